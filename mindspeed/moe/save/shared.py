"""Shared experts that keep nothing but the layer's input, which the router keeps anyway.

    saved = SavedShared(halves, parameters)
    y = saved.second(saved.first(hidden), hidden)      # halves: mindspeed.moe.layer.call

The first half, up to the activation, runs again in backward. With tensor parallelism its
communications run again, too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch

from mindspeed.memory.frames import key_of
from mindspeed.memory.saved import Kept, ViewOf
from mindspeed.memory.segment import Segment
from mindspeed.moe.events import EventKind, EventLog


class Halves(Protocol):
    """Shared experts in two halves."""

    def first(self, hidden: torch.Tensor) -> torch.Tensor:
        """Up to the activation: ``[s, b, h]`` to ``[s, b, f]``."""
        ...

    def second(self, activated: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the output ``[s, b, h]`` from it, ``[s, b, f]``, and the input ``[s, b, h]``."""
        ...


class SavedShared:
    """One call of the shared experts.

    Args:
        parameters: Of both halves; they exist anyway.
        log: Gets an event for the second run.
    """

    def __init__(
        self,
        halves: Halves,
        parameters: Iterable[torch.Tensor],
        name: str = "shared experts",
        log: EventLog | None = None,
    ) -> None:
        self._halves, self._name, self._log = halves, name, log
        self._exists = {key_of(x) for x in parameters}
        self._segment: Segment | None = None

    def first(self, hidden: torch.Tensor) -> torch.Tensor:
        """The first half, ``[s, b, h]`` to ``[s, b, f]``; what it saves is dropped."""
        if not torch.is_grad_enabled():
            return self._halves.first(hidden)
        environment, note = lambda: contextlib.nullcontext, partial(_note, self._log)
        first = self._halves.first
        segment = self._segment = Segment(self._name, first, (hidden,), {}, environment, note)
        exists, again = {*self._exists, key_of(hidden)}, weakref.ref(segment)

        def pack(tensor: torch.Tensor) -> Any:
            saved = again().save(tensor)  # type: ignore[union-attr]
            return Kept(tensor, self._name) if key_of(tensor) in exists else saved

        with _hooks(pack):
            return self._halves.first(hidden)

    def second(self, activated: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The second half, ``[s, b, f]`` and ``[s, b, h]`` to ``[s, b, h]``; ``f`` is dropped."""
        if self._segment is None:
            return self._halves.second(activated, hidden)
        again, key = weakref.ref(self._segment), key_of(activated)

        def pack(tensor: torch.Tensor) -> Any:
            if key_of(tensor) != key:
                return Kept(tensor, self._name)
            return ViewOf(again().save_output(0, tensor), tensor)  # type: ignore[union-attr]

        with _hooks(pack):
            return self._halves.second(activated, hidden)

    def again(self) -> Callable[[], None]:
        """Computes the first half now, if backward still needs it; does not keep anything alive."""
        reference = None if self._segment is None else weakref.ref(self._segment)

        def recompute() -> None:
            segment = None if reference is None else reference()
            if segment is not None:
                segment.materialize()

        return recompute


def _note(log: EventLog | None) -> None:
    if log is not None:
        log.add("backward", EventKind.COMPUTE, "recompute_shared")


def _hooks(pack: Callable[[torch.Tensor], Any]) -> contextlib.AbstractContextManager[object]:
    return torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.get())
