"""Tensors in host memory that copies to and from the device use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mindspeed.device.detect import current


def empty(
    shape: Sequence[int] | int, dtype: torch.dtype, *, pinned: bool | None = None
) -> torch.Tensor:
    """An uninitialised tensor in host memory.

    Args:
        shape: such as ``[s, h]``.
        dtype: of its elements.
        pinned: lock the memory, for copies that run next to computation; default: where the device
            can use that.
    """
    if pinned is None:
        pinned = current().has("pinned_memory")
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)


def host_tensor(
    shape: Sequence[int] | int, dtype: torch.dtype, *, pinned: bool | None = None
) -> torch.Tensor:
    """:func:`empty`, as instruments see it."""
    return empty(shape, dtype, pinned=pinned)
