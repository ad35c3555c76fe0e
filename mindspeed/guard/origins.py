"""The operator that first makes a value that is not finite out of finite ones.

Attention masks are infinite by intent, a square may overflow in a norm whose result is finite, and
memory that is not written yet holds anything. So each result that is not finite is noted with the
operator that it follows from, and an operator is named only when a tensor that follows from it is
asked for: the output of a module, or a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_UNWRITTEN = ("empty", "new_empty")


class FirstNotFinite(TorchDispatchMode):
    """Looks at what every operator returns, until one was found.

    Args:
        where: Says what runs, when an operator is noted.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self._where = where
        self._origins: dict[int, tuple[str, str]] = {}
        self.done = False

    def origin(self, x: torch.Tensor) -> tuple[str, str] | None:
        """The operator that a tensor ``[...]`` follows from that is not finite, and what ran."""
        return None if is_finite(x) else self._origins.get(_memory(x))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note it if its result is not finite."""
        kwargs = kwargs or {}
        if self.done:
            return func(*args, **kwargs)
        name = str(func).removeprefix("aten.")
        changes = func._schema.is_mutable
        entering = list(_tensors((args, kwargs)))
        bad = [one for one in entering if not is_finite(one)] if changes else None
        result = func(*args, **kwargs)
        memory = {_memory(one) for one in entering}
        for one in _tensors(result):
            place = _memory(one)
            if name.startswith(_UNWRITTEN) or is_finite(one):
                if place not in memory:
                    self._origins.pop(place, None)
                continue
            if bad is None:
                bad = [one for one in entering if not is_finite(one)]
            own = None if bad else (name, self._where())
            origin = own or next(filter(None, (self._origins.get(_memory(x)) for x in bad)), None)
            if origin is not None:
                self._origins[place] = origin
        return result


def is_finite(x: torch.Tensor) -> bool:
    """Whether all values are; those of integers are. Waits for the device."""
    return not x.is_floating_point() or bool(torch.isfinite(x).all())


def _memory(x: torch.Tensor) -> int:
    """Equal for views of one tensor."""
    return x.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
