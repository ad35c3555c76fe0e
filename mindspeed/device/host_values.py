"""Tensors on the host that say how to compute: lengths of sequences, numbers of rows.

They have values and can be read while the tensors that are computed with are FakeTensors, which
have none, and no dispatch mode sees them: an instrument counts what a model computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

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
