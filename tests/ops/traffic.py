"""Counts the memory traffic of eager torch: bytes read and written by every kernel.

    with traffic() as count:
        y = formula(x)
    assert count.bytes == 36 * x.numel()

Views and allocations move nothing; a broadcast dimension is read once. What one fused kernel moves
is its inputs and outputs, :func:`model_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}


class Traffic(TorchDispatchMode):
    """Bytes and kernels so far."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in _FREE:
            return out
        self.kernels += 1
        self.bytes += model_bytes((args, kwargs), out)
        return out


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count inside the block; custom operators count as one kernel."""
    with Traffic() as count:
        yield count


def model_bytes(inputs: Any, outputs: Any) -> int:
    """Bytes of all tensors in ``inputs`` and ``outputs``: what one kernel has to move."""
    return sum(_bytes(x) for x in tree_leaves((inputs, outputs)) if isinstance(x, torch.Tensor))


def _bytes(x: torch.Tensor) -> int:
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements *= size if stride else 1
    return elements * x.element_size()
