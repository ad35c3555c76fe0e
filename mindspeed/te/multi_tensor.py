"""Operations on lists of tensors in the calling convention of ``multi_tensor_applier``.

    multi_tensor_applier(operation, overflow, [list, list], *arguments)

calls ``operation(chunk size, overflow, lists, *arguments)``. ``overflow`` is an integer tensor that
is set to 1 when a value is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Lists = Sequence[Sequence[torch.Tensor]]

CHUNK = 2048 * 32


def multi_tensor_applier(
    operation: Callable[..., Any], overflow: torch.Tensor, lists: Lists, *arguments: Any
) -> Any:
    """Apply ``operation`` to lists of tensors.

    Args:
        operation: ``(chunk, overflow, lists, *arguments)``.
        overflow: int32 ``[1]``.
        lists: Tensors, as the operation requires.
        *arguments: Of the operation.
    """
    return operation(CHUNK, overflow, lists, *arguments)


def multi_tensor_l2norm(
    chunk: int, overflow: torch.Tensor, lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the L2 norm of all tensors together, and that of each with ``per_tensor``.

    Args:
        chunk: Not read.
        overflow: int32 ``[1]``; not set.
        lists: One list of n tensors, any shape and floating dtype.
        per_tensor: Return the norms of the tensors.

    Returns:
        fp32 ``[1]``, and fp32 ``[n]`` or None.
    """
    tensors = list(lists[0])
    if not tensors:
        nothing = torch.zeros(1, dtype=torch.float32, device=overflow.device)
        return nothing, nothing[:0] if per_tensor else None
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    return torch.linalg.vector_norm(norms).unsqueeze(0), norms if per_tensor else None


def multi_tensor_scale(chunk: int, overflow: torch.Tensor, lists: Lists, scale: Any) -> None:
    """Write ``source * scale`` into each destination.

    Args:
        chunk: Not read.
        overflow: int32 ``[1]``, set to 1 if a result is not finite.
        lists: Sources and destinations, pairwise of one shape; any floating dtypes.
        scale: A number or a scalar tensor.
    """
    pairs = [(a, b) for a, b in zip(lists[0], lists[1], strict=True) if b.numel()]
    sources, destinations = [a for a, _ in pairs], [b for _, b in pairs]
    if not sources:
        return
    factor = float(scale) if not isinstance(scale, torch.Tensor) else scale
    if all(a is b for a, b in zip(sources, destinations, strict=True)):
        torch._foreach_mul_(destinations, factor)
    else:
        copied = isinstance(factor, float) and factor == 1.0  # no second copy for a cast
        scaled = sources if copied else torch._foreach_mul(sources, factor)
        torch._foreach_copy_(destinations, scaled)
    peaks = torch.stack(torch._foreach_norm(destinations, float("inf"), dtype=torch.float32))
    overflow.logical_or_(~torch.isfinite(peaks).all())
