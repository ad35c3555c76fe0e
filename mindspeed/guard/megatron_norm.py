"""A flag that travels in the reduction of the gradient norm: no collective, no read of its own.

    before the reduction   a rank whose flag is set makes one of its gradients infinite
    after it               the norm is infinite on every rank, and on its way to the host anyway

A finite norm says that the flag is set nowhere. After any other, ranks must ask each other, as the
gradients may be not finite by themselves; that step is not usual. Gradients keep every bit where
the flag is not set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def carry(
    optimizer: Any,
    flag: Callable[[], torch.Tensor | None],
    after_norm: Callable[[bool], bool],
) -> bool:
    """Let the gradient norm of an optimizer carry a flag.

    Args:
        optimizer: What ``get_megatron_optimizer`` returns.
        flag: Bool ``[]`` of this rank, on its device; None: not set.
        after_norm: Called on all ranks with whether the norm is finite, before anything is updated;
            returns whether the gradients are new ones.

    Returns:
        False if no norm of this optimizer is reduced over all ranks before anything else is decided
        by gradients (fp16 skips a step whose gradients are not finite). Nothing is changed then.
    """
    carrier = _carrier(optimizer)
    if carrier is None:
        return False
    gradients, norm_of_carrier = carrier.get_main_grads_for_grad_norm, carrier.get_grad_norm
    norm_of_all = optimizer.get_grad_norm
    carried: list[float] = []

    def marked_gradients() -> list[torch.Tensor]:
        return _marked(gradients(), flag())

    def noted_norm() -> float:
        carried.append(norm_of_carrier())
        return carried[-1]

    def settled_norm() -> float:
        """The norm of the gradients that count."""
        while True:
            carried.clear()
            norm: float = norm_of_all()
            # The norms of other parts are those of fewer ranks, which would decide otherwise.
            if not after_norm(math.isfinite(carried[0] if carried else norm)):
                return norm
            optimizer.prepare_grads()

    carrier.get_main_grads_for_grad_norm = marked_gradients
    carrier.get_grad_norm = noted_norm
    optimizer.get_grad_norm = settled_norm
    return True


def _carrier(optimizer: Any) -> Any | None:
    """The part of the optimizer whose norm is reduced over all ranks."""
    parts = getattr(optimizer, "chained_optimizers", ())
    if any(getattr(part, "grad_scaler", None) is not None for part in parts):
        return None
    everyone = dist.get_world_size()
    reduced = (
        part
        for part in parts
        if dist.get_world_size(part.get_grad_stats_parallel_group()) == everyone
    )
    return next(reduced, None)


def _marked(gradients: list[torch.Tensor], flag: torch.Tensor | None) -> list[torch.Tensor]:
    """Gradients ``[...]``, one element of which is infinite where the flag is set."""
    if flag is None:
        return gradients
    first = next((one for one in gradients if one.numel()), None)
    if first is None:
        return [*gradients, torch.where(flag, math.inf, 0.0).view(1)]
    element = first.view(-1)[:1]
    element.masked_fill_(flag, math.inf)
    return gradients
