"""Update rules: how one optimizer step changes weights and states.

:class:`mindspeed.te.optimizers.FusedAdam` keeps the states of a rule and calls it with lists of
tensors of one dtype: fp32, or wider for wider parameters. A rule sees neither how states are stored
(:mod:`mindspeed.optimizer.codecs`) nor how parameters are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_STEP_WITHOUT_CORRECTION = 2.0**24
"""A step count at which ``1 - beta ** step`` is 1 in fp32: Adam without bias correction."""

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class StepOptions:
    """Options of a parameter group at one step.

    Attributes:
        step: number of this step, from 1.
        lr: learning rate; a tensor on the device with ``capturable``.
        betas: decays of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: weight decay.
        bias_correction: correct the moments for their start at zero.
        decoupled_weight_decay: decay the weights (AdamW) instead of adding to the gradient (L2).
        grad_scale: divide the gradients by this scalar (``capturable`` with a gradient scaler).
        found_inf: a scalar; not zero: change nothing (``capturable`` with a gradient scaler).
    """

    step: float
    lr: float | torch.Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: bool
    decoupled_weight_decay: bool
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None


@dataclass(frozen=True)
class UpdateRule:
    """One step of an optimizer.

    Attributes:
        states: name -> the initial value of this state for a weight (any shape, fp32). The state
            ``exp_avg`` is stored in Megatron's ``--exp-avg-dtype``, ``exp_avg_sq`` in
            ``--exp-avg-sq-dtype``, others in fp32.
        update: changes weights and states in place: ``(weights, gradients, states, options)``.
            Tensors of equal index belong together and have the parameter's shape, which is flat
            under Megatron's distributed optimizer.
        elementwise: each weight is updated from its own gradient and states alone, so a large
            tensor may come in parts.
        flag: what the user types for it, for messages.
    """

    states: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
    update: Callable[[Tensors, Tensors, Mapping[str, Tensors], StepOptions], None]
    elementwise: bool = False
    flag: str = "another update rule"


def adam(
    weights: Tensors, grads: Tensors, states: Mapping[str, Tensors], options: StepOptions
) -> None:
    """Adam or AdamW, one fused operator for all tensors.

    Args:
        weights: any shapes, one floating dtype of at least 32 bits.
        grads: shapes and dtype of the weights.
        states: ``exp_avg`` and ``exp_avg_sq``, shapes and dtype of the weights.
        options: of the parameter group.
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
