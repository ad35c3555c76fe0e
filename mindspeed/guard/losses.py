"""Losses of all micro-batches of a step, on every rank: one all-reduce.

    [sums of losses | numbers of tokens | losses not finite]     one number a micro-batch
    [ranks with gradients that are not finite]                   fp32

``4 * (3 * micro-batches of all data-parallel ranks + 1)`` bytes a step, and one wait for the
device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.adaptor.training_steps import MicroBatchNumbers


@dataclass(frozen=True)
class StepLosses:
    """What the ranks of a step have.

    Attributes:
        losses: Mean of each micro-batch; nan where it is not finite.
        mean: Of all tokens; nan if one is not finite.
        bad: Micro-batches whose loss is not finite.
        bad_gradients: Number of ranks with gradients that are not finite.
    """

    losses: list[float]
    mean: float
    bad: list[int]
    bad_gradients: int


class LossNotes:
    """Notes the losses of a step on this rank.

    Args:
        forward_step: Megatron's or a user's.
        micro_batches: Of this rank, in a step.
    """

    def __init__(self, forward_step: Callable[..., Any], micro_batches: int) -> None:
        from megatron.core import parallel_state

        self._counts = parallel_state.get_tensor_model_parallel_rank() == 0
        self._total = micro_batches * parallel_state.get_data_parallel_world_size()
        self._noted: list[tuple[int, torch.Tensor, torch.Tensor | float]] = []
        self._forward_step = forward_step

    def forward_step(self) -> Callable[..., Any]:
        """The forward step, whose losses are noted."""
        numbers = MicroBatchNumbers()

        @functools.wraps(self._forward_step)
        def run(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            number = numbers.next(model)
            output, loss_function = self._forward_step(data_iterator, model, *args, **kwargs)

            @functools.wraps(loss_function)
            def loss(*given: Any, **named: Any) -> Any:
                found = loss_function(*given, **named)
                if isinstance(found, tuple) and self._counts:
                    tokens = found[1].detach().clone() if len(found) == 3 else 1.0
                    # The schedule divides a loss in place.
                    self._noted.append((number, found[0].detach().clone(), tokens))
                return found

            return output, loss

        return run

    def gather(self, gradients: Iterable[torch.Tensor]) -> StepLosses:
        """Add what all ranks have noted. Collective.

        Args:
            gradients: Of this rank ``[...]``, which are looked at.
        """
        total = self._total
        where = device.current().torch_device()
        numbers = torch.zeros(3 * total + 1, device=where)
        for number, loss, tokens in self._noted:
            value = loss.float().view(())
            bad = ~torch.isfinite(value)
            numbers[number] += torch.where(bad, 0.0, value)
            numbers[total + number] += tokens
            numbers[2 * total + number] += bad
        for gradient in gradients:
            least, most = torch.aminmax(gradient.detach())  # no sum that overflows, and no copy
            numbers[-1] += ~torch.isfinite(least - most)
        dist.all_reduce(numbers)
        found = numbers.tolist()
        sums, counts, wrong = (found[at * total : (at + 1) * total] for at in range(3))
        losses = [
            float("nan") if bad else value / max(count, 1.0)
            for value, count, bad in zip(sums, counts, wrong, strict=True)
        ]
        mean = float("nan") if any(wrong) else sum(sums) / max(sum(counts), 1.0)
        return StepLosses(losses, mean, [at for at, bad in enumerate(wrong) if bad], int(found[-1]))
