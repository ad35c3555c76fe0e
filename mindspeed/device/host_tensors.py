"""Tensors in host memory for copies, and values of tensors that the host reads.

Tensors on the host that say how to compute (lengths of sequences, numbers of rows) have values
while the tensors that are computed with are FakeTensors, and no dispatch mode sees them: an
instrument counts what a model computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed.device.detect import current


def empty(
    shape: Sequence[int] | int, dtype: torch.dtype, *, pinned: bool | None = None
) -> torch.Tensor:
    """An uninitialised tensor in host memory.

    Args:
        shape: such as ``[s, h]``.
        pinned: lock the memory, for copies that run next to computation; default: where the device
            can use that.
    """
    if pinned is None:
        pinned = current().has("pinned_memory")
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)


def mapped(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor ``shape`` in host memory that kernels of the device address."""
    return current().empty_host_mapped(shape, dtype)


def host_mapped_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """:func:`mapped`, as instruments see it."""
    return mapped(shape, dtype)


def host_tensor(
    shape: Sequence[int] | int, dtype: torch.dtype, *, pinned: bool | None = None
) -> torch.Tensor:
    """:func:`empty`, as instruments see it."""
    return empty(shape, dtype, pinned=pinned)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_values(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function``, in which tensors are real, under any dispatch mode."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


@with_values
def numbers(tensor: torch.Tensor) -> list[Any]:
    """Values of a tensor on the host, as ``tolist`` gives them.

    Raises:
        torch._subclasses.fake_tensor.DataDependentOutputException: it is a FakeTensor.
    """
    return tensor.tolist()  # type: ignore[no-any-return]
