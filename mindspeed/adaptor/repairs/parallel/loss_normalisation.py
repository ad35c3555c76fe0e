"""Defect: losses are divided by the wrong number of tokens.

Where: ``megatron.core.pipeline_parallel.schedules.forward_step_calc_loss``. A loss function of
three values, ``(sum, number of tokens, report)``, is divided by the tokens of one context-parallel
rank (Megatron-LM PR 7513). One of two values is divided by nothing if losses are per token, which
sums gradients over the data- and context-parallel ranks (verl issue 6609). The loss is divided in
place, and with it a report that shares its memory, such as ``loss.detach()`` (Primus PR 1079).
Symptom: silent; with context parallelism and masked tokens (fine-tuning) a token counts the more,
the fewer tokens its rank has; with ``--calculate-per-token-loss`` the gradients of a loss function
of two values are too large by the number of ranks. A reported loss is divided by the number of
micro-batches.
Fix: the number of tokens is the mean over the context-parallel ranks; equal numbers change nothing.
Cost: one scalar all-reduce per micro-batch. A loss function of two values is refused where losses
are per token.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.patch import Patch
from mindspeed.errors import TrainingError

OWNER = "repair:loss-normalisation"


def divide_by_tokens_of_all_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward_step_calc_loss``, which calls the loss function on a last stage."""

    def forward_step_calc_loss(
        model: Any, output_tensor: Any, loss_func: Any, config: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        if loss_func is None:
            return original(model, output_tensor, loss_func, config, *args, **kwargs)
        counts: list[torch.Tensor] = []

        def normalised(output: Any, **options: Any) -> Any:
            returned = loss_func(output, **options)
            if options.get("non_loss_data") or not isinstance(returned, tuple):
                return returned
            returned = (returned[0].clone(), *returned[1:])  # Megatron divides it in place
            if config.calculate_per_token_loss:
                _refuse_two_values(returned)
            elif len(returned) == 3:
                loss, count, report = returned
                counts.append(count)
                return (*normalised_loss(loss, count, _context_group()), report)
            return returned

        loss, count = original(model, output_tensor, normalised, config, *args, **kwargs)
        return loss, counts[0] if counts else count

    return forward_step_calc_loss


def normalised_loss(
    loss: torch.Tensor, count: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the number by which each rank divides it, so that their mean is right.

    Args:
        loss: ``[]``, the sum over this rank's tokens.
        count: ``[]``, any dtype, how many of them count.
        group: The ranks that share the sequences, or None.
    """
    if group is None or group.size() == 1:
        return loss, count
    total = torch.as_tensor(count, device=loss.device).detach().clone()
    dist.all_reduce(total, group=group)
    mean = total / group.size()
    # Megatron divides by 1 at least; a few tokens of many ranks have a mean below it.
    below = torch.where((mean > 0) & (mean < 1), 1 / mean, torch.ones_like(mean))
    return loss * below.to(loss.dtype), mean


def _context_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group(check_initialized=False)


def _refuse_two_values(returned: tuple[Any, ...]) -> None:
    if len(returned) == 2 and getattr(returned[0], "requires_grad", False):  # not an evaluation
        raise TrainingError(
            "--calculate-per-token-loss needs a loss function that returns (sum of the losses, "
            "number of tokens, report); this one returns (loss, report), whose gradients nothing "
            "would divide: return the number of tokens too, or drop the flag"
        )


PATCHES = (
    Patch(
        "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
        divide_by_tokens_of_all_ranks,
        OWNER,
        "a loss is a mean over the tokens of all context-parallel ranks",
        expects="(model, output_tensor, loss_func, config, ...)",
    ),
)
