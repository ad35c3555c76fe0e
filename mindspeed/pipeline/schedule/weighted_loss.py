"""Losses of micro-batches of different sizes: every sample counts the same.

A schedule averages over micro-batches. So what is a mean over the samples of a micro-batch is
weighted by :func:`.micro_batch_sizes.loss_weight`; sums over tokens are right already.

A loss function returns ``(loss, reports)`` or ``(loss, number of tokens, reports)``. The loss is
divided by the number of tokens, if it is not summed over all tokens of a step
(``--calculate-per-token-loss``), and by m. ``reports`` maps names to tensors of one element, a
mean, or two, a sum and its count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

ForwardStep = Callable[..., tuple[Any, Any]]


def with_weight(forward_step: ForwardStep, weight: float, *, per_token: bool) -> ForwardStep:
    """A forward step for one micro-batch that counts ``weight`` times.

    Args:
        forward_step: Megatron's: returns an output and its loss function.
        weight: of the micro-batch.
        per_token: losses are summed over all tokens of the step.
    """

    def step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output, loss_function = forward_step(*args, **kwargs)
        if loss_function is None:
            return output, None

        def weighted(output: Any, **options: Any) -> Any:
            returned = loss_function(output, **options)
            if options.get("non_loss_data"):
                return returned
            loss, *num_tokens, reports = returned
            if not (per_token and num_tokens):
                loss = loss * weight
            return (loss, *num_tokens, weighted_reports(reports, weight))

        return output, weighted

    return step


def weighted_reports(reports: Any, weight: float) -> Any:
    """Reports of a micro-batch in which means count ``weight`` times.

    Args:
        reports: of a loss function: a mapping; an object with a method ``weighted(weight)``, which
            decides; a mean alone. Anything else stays.
        weight: of the micro-batch.
    """
    if hasattr(reports, "weighted"):
        return reports.weighted(weight)
    if isinstance(reports, Mapping):
        return {name: weighted_reports(value, weight) for name, value in reports.items()}
    is_mean = isinstance(reports, torch.Tensor) and reports.numel() == 1
    return reports * weight if is_mean else reports
