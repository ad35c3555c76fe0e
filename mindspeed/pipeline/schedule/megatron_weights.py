"""Weights of micro-batches of different sizes in Megatron's losses.

The loss itself is weighted in :mod:`mindspeed.pipeline.schedule.regrouped_samples`.
The losses of experts and of multi-token prediction take their scale from a global variable when
their backward runs; it is set for every micro-batch. What they report is summed in global tables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_moe_layer_wise_logging_tracker,
)
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
)

from mindspeed import device
from mindspeed.pipeline.schedule.micro_batch_sizes import loss_weight
from mindspeed.pipeline.schedule.regrouped_samples import with_weight


@dataclass(frozen=True)
class MicroBatchWeights:
    """Weight of each micro-batch of a step.

    Attributes:
        sizes: samples of each micro-batch; None where all are equal: nothing changes.
        config: the model's configuration.
        context_ranks: size of a context-parallel group.
    """

    sizes: Sequence[int] | None
    config: Any
    context_ranks: int = 1

    def forward_step(self, function: Callable[..., Any], microbatch: int) -> Callable[..., Any]:
        if self.sizes is None:
            return function
        weight = loss_weight(self.sizes, microbatch)

        def step(*args: Any, **kwargs: Any) -> Any:
            with _reports_weighted(weight):
                return function(*args, **kwargs)

        return with_weight(step, weight, per_token=self.config.calculate_per_token_loss)

    def before_backward(self, microbatch: int) -> None:
        """Set the scales of auxiliary losses."""
        config = self.config
        if self.sizes is None or config.calculate_per_token_loss:
            return
        scale = torch.ones(1, device=device.current().torch_device())
        if config.grad_scale_func is not None:
            scale = config.grad_scale_func(scale)
        scale = scale * loss_weight(self.sizes, microbatch) / len(self.sizes)
        if getattr(config, "num_moe_experts", None) is not None:
            MoEAuxLossAutoScaler.set_loss_scale(scale * self.context_ranks)
        if getattr(config, "mtp_num_layers", None) is not None:
            MTPLossAutoScaler.set_loss_scale(scale)


@contextlib.contextmanager
def _reports_weighted(weight: float) -> Iterator[None]:
    """Around the forward of a micro-batch: what it adds to sums of auxiliary losses."""
    before = {name: values.clone() for name, values in _reported().items()}
    yield
    for name, values in _reported().items():
        values.lerp_(before.get(name, torch.zeros_like(values)), 1 - weight)


def _reported() -> dict[str, torch.Tensor]:
    """The sums, one per layer, that layers add their auxiliary losses to."""
    tables = get_moe_layer_wise_logging_tracker().items()
    found = {name: table["values"] for name, table in tables if "values" in table}
    predicted = MTPLossLoggingHelper.tracker
    for name in predicted.keys() & {"values", "loss_values"}:  # the second since 0.19
        found["mtp"] = predicted[name]
    return found
