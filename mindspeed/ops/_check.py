"""Argument checks with one message format: operator, argument, allowed, given.

    check = Check("rms_norm")
    check.floating(x=x, gamma=gamma)
    check.require(gamma.shape == x.shape[-1:], "gamma", f"shape {x.shape[-1:]}", gamma.shape)

Only shapes, dtypes and devices are read, never the values of a tensor on a device (that would
synchronise); checks of values run on lists, on CPU tensors, and elsewhere with
``MINDSPEED_OPS_DEBUG=1``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from mindspeed.errors import MindSpeedError

T = TypeVar("T")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class OperatorError(MindSpeedError, ValueError):
    """An operator was given an argument that it does not take."""


class ArgumentCheck:
    """The checks of the public function ``name``, as the user calls it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fail(self, argument: str, expected: str, got: Any) -> NoReturn:
        raise OperatorError(
            f"mindspeed.ops.{self.name}: {argument}: expected {expected}, got {_show(got)}"
        )

    def require(self, condition: bool, argument: str, expected: str, got: Any) -> None:
        """Refuse an argument unless ``condition``."""
        if not condition:
            self.fail(argument, expected, got)

    def floating(self, **tensors: Tensor | None) -> None:
        """Require one floating dtype and one device of all given tensors."""
        self.dtype(FLOATS, **tensors)
        self.same("dtype", **tensors)
        self.same("device", **tensors)

    def dtype(self, allowed: Sequence[torch.dtype], **tensors: Tensor | None) -> None:
        """Require an allowed dtype of every given tensor.

        float64 is accepted where fp32 is.
        """
        for name, x in tensors.items():
            if x is None:
                continue
            self.tensor(**{name: x})
            kinds = (*allowed, torch.float64) if torch.float32 in allowed else tuple(allowed)
            self.require(x.dtype in kinds, name, f"dtype {_list(allowed)}", x.dtype)

    def tensor(self, **tensors: Any) -> None:
        """Require dense tensors: none is sparse."""
        for name, x in tensors.items():
            self.require(isinstance(x, Tensor), name, "a tensor", x)
            self.require(x.layout == torch.strided, name, "a strided tensor", x.layout)

    def number(self, **values: Any) -> None:
        """Every value is a real number."""
        for name, value in values.items():
            kinds = (Real, torch.SymInt, torch.SymFloat)
            self.require(isinstance(value, kinds) and value == value, name, "a number", value)

    def integer(self, **values: Any) -> None:
        """Every value is a whole number."""
        for name, value in values.items():
            whole = isinstance(value, (Integral, torch.SymInt))
            self.require(whole, name, "a whole number", value)

    def same(self, what: str, **tensors: Tensor | None) -> None:
        """Require tensors, None aside, that agree in ``dtype``, ``device`` or ``shape``."""
        tensors = {name: x for name, x in tensors.items() if x is not None}
        self.tensor(**tensors)
        given = {name: getattr(x, what) for name, x in tensors.items()}
        names = list(given)
        for name in names[1:]:
            expected = f"the {what} of {names[0]}, {_show(given[names[0]])}"
            self.require(given[name] == given[names[0]], name, expected, given[name])

    def rank(self, *ranks: int, **tensors: Tensor) -> None:
        """Require one of these numbers of dimensions of every tensor, such as 2 for ``[s, h]``."""
        for name, x in tensors.items():
            self.tensor(**{name: x})
            expected = f"{' or '.join(map(str, ranks))} dimensions"
            self.require(x.dim() in ranks, name, expected, f"shape {tuple(x.shape)}")

    def shape(self, expected: Sequence[int], **tensors: Tensor) -> None:
        """Require this shape of every tensor.

        Args:
            expected: sizes; ``(4, 8)`` stands for ``[4, 8]``.
            **tensors: by argument name, any dtype.
        """
        for name, x in tensors.items():
            self.require(
                tuple(x.shape) == tuple(expected), name, f"shape {tuple(expected)}", tuple(x.shape)
            )

    def choice(self, allowed: Sequence[Any], **values: Any) -> None:
        """Every value is one of these."""
        for name, value in values.items():
            known = not isinstance(value, Tensor) and value in allowed
            self.require(known, name, f"one of {_list(allowed)}", value)

    def forward_only(self, **tensors: Tensor | None) -> None:
        """Refuse arguments that require a gradient: the operator has none."""
        for name, x in tensors.items():
            if x is not None and x.requires_grad and torch.is_grad_enabled():
                raise OperatorError(
                    f"mindspeed.ops.{self.name} has no gradient, but {name} requires one; call it "
                    "under torch.no_grad() or detach the argument"
                )

    def values_known(self, x: Tensor) -> bool:
        """Whether reading ``x`` is free, or requested by the user."""
        if torch.compiler.is_compiling() or isinstance(x, torch._subclasses.FakeTensor):
            return False
        return x.device.type == "cpu" or os.environ.get("MINDSPEED_OPS_DEBUG") == "1"


def public(name: str, function: Callable[..., T], *fixed: Any) -> Callable[..., T]:
    """``function`` under a public name, its first arguments given: the check and ``fixed``."""
    made: Any = functools.partial(function, ArgumentCheck(name), *fixed)
    functools.update_wrapper(made, function)
    made.__name__ = made.__qualname__ = name
    del made.__wrapped__  # its signature has the fixed arguments
    return made  # type: ignore[no-any-return]


def _show(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, torch.Size):
        return str(tuple(value))
    return repr(value) if isinstance(value, str) and " " not in value else str(value)


def _list(values: Sequence[Any]) -> str:
    return ", ".join(dict.fromkeys(_show(value) for value in values))
