"""``FusedSGD`` with the signature Megatron expects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class FusedSGD(torch.optim.SGD):
    """SGD with momentum, on lists of tensors.

    Args:
        params: Parameters or param groups.
        lr: Learning rate.
        momentum: Momentum.
        dampening: Dampening of the momentum.
        weight_decay: L2 penalty.
        nesterov: Nesterov momentum.
        wd_after_momentum: Only False is available.
        materialize_master_grads: Only accepted for compatibility.
        set_grad_none: Only accepted for compatibility.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise RuntimeError("FusedSGD: wd_after_momentum is not available")
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov=nesterov, foreach=True
        )
