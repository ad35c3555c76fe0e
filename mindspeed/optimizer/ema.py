"""AdamW that also keeps an exponential moving average (EMA) of the weights.

    w <- AdamW(w, g)
    e <- d e + (1 - d) w        d = min(decay, (1 + n) / (10 + n)) in update n = 1, 2, ...

``e`` starts as a copy of the weights. The warm-up of ``d`` lets it forget them: with 0.9999 from
the start it would need ten thousand updates. A skipped update changes neither ``e`` nor ``n``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from mindspeed.optimizer.rules import StepOptions, Tensors, UpdateRule, adam

STATE = "ema_params"


def ema_adamw(decay: float) -> UpdateRule:
    """The rule; its third state, :data:`STATE`, is the average.

    Args:
        decay: the largest ``d``, in [0, 1].
    """
    states = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like, STATE: torch.clone}
    flag = "--optimizer-selection fused_ema_adamw"
    return UpdateRule(states, partial(_update, decay), elementwise=True, flag=flag)


def effective_decay(decay: float, step: float) -> float:
    """``d`` of update ``step``, counted from 1."""
    return min(decay, (1 + step) / (10 + step))


def _update(
    decay: float,
    weights: Tensors,
    grads: Tensors,
    states: Mapping[str, Tensors],
    options: StepOptions,
) -> None:
    """One step.

    Args:
        decay: the largest ``d``.
        weights: any shapes, one floating dtype of at least 32 bits.
        grads: shapes and dtype of the weights.
        states: ``exp_avg``, ``exp_avg_sq`` and ``ema_params``, shapes and dtype of the weights.
        options: of the parameter group.
    """
    adam(weights, grads, states, options)
    kept = effective_decay(decay, options.step)
    torch._foreach_mul_(states[STATE], kept)
    torch._foreach_add_(states[STATE], weights, alpha=1 - kept)
