"""Update rules: how one optimizer step changes weights and states.

:class:`mindspeed.te.optimizers.FusedAdam` keeps the states of a rule and calls it with lists of
tensors of one dtype: fp32, or wider for wider parameters. A rule sees neither how states are stored
(:mod:`mindspeed.optimizer.codecs`) nor how parameters are sharded.

An exponential moving average (EMA) of the weights can be kept beside AdamW:

    w <- AdamW(w, g)
    e <- d e + (1 - d) w        d = min(decay, (1 + n) / (10 + n)) in update n = 1, 2, ...

``e`` starts as a copy of the weights. The warm-up of ``d`` lets it forget them: with 0.9999 from
the start it would need ten thousand updates. A skipped update changes neither ``e`` nor ``n``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

_STEP_WITHOUT_CORRECTION = 2.0**24
"""A step count at which ``1 - beta ** step`` is 1 in fp32: Adam without bias correction."""

ADDED = ("fused_adam", "cadam")  # Megatron does not know them and is given adam
NAMES = ("adam", "sgd", "muon", "dist_muon", *ADDED)
"""Values of ``--optimizer``."""

Tensors = list[Tensor]


def chosen(arguments: Mapping[str, Any]) -> str:
    """The optimizer that the user chose, also after Megatron was given another name."""
    return str(arguments.get("update_rule") or arguments.get("optimizer") or "adam")


@dataclass(frozen=True)
class StepOptions:
    """Options of a parameter group at one step.

    Attributes:
        step: number of this step, from 1.
        lr: learning rate; a tensor on the device with ``capturable``.
        betas: decays of the first and the second moment.
        eps: added to the root of the second moment.
        bias_correction: correct the moments for their start at zero.
        decoupled_weight_decay: decay the weights (AdamW) instead of adding to the gradient (L2).
        grad_scale: divide the gradients by this scalar (``capturable`` with a gradient scaler).
        found_inf: a scalar; not zero: change nothing (``capturable`` with a gradient scaler).
    """

    step: float
    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: bool
    decoupled_weight_decay: bool
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


@dataclass(frozen=True)
class UpdateRule:
    """One step of an optimizer.

    Attributes:
        states: name -> the initial value of this state for a weight, fp32. The state
            ``exp_avg`` is stored in Megatron's ``--exp-avg-dtype``, ``exp_avg_sq`` in
            ``--exp-avg-sq-dtype``, others in fp32.
        update: changes weights and states in place: ``(weights, gradients, states, options)``.
            Tensors of equal index belong together and have the parameter's shape, which is flat
            under Megatron's distributed optimizer.
        elementwise: each weight is updated from its own gradient and states alone, so a large
            tensor may come in parts.
        flag: what the user types for it, for messages.
    """

    states: Mapping[str, Callable[[Tensor], Tensor]]
    update: Callable[[Tensors, Tensors, Mapping[str, Tensors], StepOptions], None]
    elementwise: bool = False
    flag: str = "another update rule"


def adam(
    weights: Tensors, grads: Tensors, states: Mapping[str, Tensors], options: StepOptions
) -> None:
    """Adam or AdamW, one fused operator for all tensors.

    Args:
        weights: one floating dtype of at least 32 bits.
        grads: shapes and dtype of the weights.
        states: ``exp_avg`` and ``exp_avg_sq``, shapes and dtype of the weights.
    """
    count = options.step if options.bias_correction else _STEP_WITHOUT_CORRECTION
    step = torch.tensor(count, device=weights[0].device)
    function = torch._fused_adamw_ if options.decoupled_weight_decay else torch._fused_adam_
    function(
        weights,
        grads,
        states["exp_avg"],
        states["exp_avg_sq"],
        [],
        [step] * len(weights),
        lr=options.lr,
        beta1=options.betas[0],
        beta2=options.betas[1],
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=options.grad_scale,
        found_inf=options.found_inf,
    )


ADAM = UpdateRule(
    {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like},
    adam,
    elementwise=True,
    flag="--optimizer adam",
)


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
        weights: one floating dtype of at least 32 bits.
        grads: shapes and dtype of the weights.
        states: ``exp_avg``, ``exp_avg_sq`` and ``ema_params``, shapes and dtype of the weights.
    """
    adam(weights, grads, states, options)
    kept = effective_decay(decay, options.step)
    torch._foreach_mul_(states[STATE], kept)
    torch._foreach_add_(states[STATE], weights, alpha=1 - kept)
