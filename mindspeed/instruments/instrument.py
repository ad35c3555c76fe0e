"""Base of the counters of this library: a ``with`` block watched by a ``TorchDispatchMode``.

An instrument sees every operator of its block and knows the phase (forward, backward, recompute)
it belongs to. Its figures may be read inside and after the block, and instruments may nest.

Recomputation is a forward pass under ``enable_grad`` inside a backward pass, so every
implementation of activation checkpoints is recognised. The grad mode alone is not sufficient, for
two reasons:

* The forward of a ``torch.autograd.Function`` runs with gradients switched off, also when an
  activation checkpoint repeats it.
* A backward may call the forward of an autograd function (the backward of an all-to-all is an
  all-to-all), and with ``create_graph=True`` all of it runs with gradients switched on.

So regions of ``enable_grad`` that are entered within a backward pass are tracked.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.journal import Journal

Self = TypeVar("Self", bound="Instrument")


class Instrument:
    """Context manager of a phase tracker and a dispatch mode, which a subclass sets.

    Attributes:
        mode: Sees the operators of the block.
        phase: Says which phase they belong to.
    """

    mode: TorchDispatchMode

    def __init__(self) -> None:
        self.phase = PhaseTracker()
        self._stack = ExitStack()

    def enter_contexts(self, stack: ExitStack) -> None:
        """Enter what else the instrument needs; it is left before the phase tracker."""
        stack.enter_context(self.mode)

    def __enter__(self: Self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.phase)
            self.enter_contexts(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


_NO_BACKWARD = -1


class PhaseTracker:
    """Context manager; :meth:`current` gives the phase of the calling thread.

    A recomputation that was already running when the tracker was entered is not recognised.
    Trackers nest like other context managers: the last one entered leaves first.
    """

    def __init__(self) -> None:
        self._journal = Journal()
        self._local = threading.local()  # the backward of a GPU runs in its own thread

    def __enter__(self) -> PhaseTracker:
        for region in (torch.enable_grad, torch.set_grad_enabled):
            self._follow(region)
        return self

    def __exit__(self, *error: Any) -> None:
        self._journal.undo()

    def current(self) -> str:
        """ "forward", "backward", or "recompute": a forward repeated inside a backward."""
        running = _backward_pass()
        if running == _NO_BACKWARD:
            return "forward"
        regions = self._regions()
        return "recompute" if regions and regions[-1] == running else "backward"

    def _follow(self, region: type) -> None:
        """Record the backward pass in which each region of enabled gradients is entered."""
        enter, leave = region.__enter__, region.__exit__  # type: ignore[attr-defined]

        def __enter__(context: Any) -> None:
            enter(context)
            if getattr(context, "mode", True):
                self._regions().append(_backward_pass())

        def __exit__(context: Any, *error: Any) -> None:
            if getattr(context, "mode", True) and self._regions():
                self._regions().pop()  # nothing to pop for a region older than the tracker
            leave(context, *error)

        self._journal.set(region, "__enter__", __enter__, owner="phase")
        self._journal.set(region, "__exit__", __exit__, owner="phase")

    def _regions(self) -> list[int]:
        if not hasattr(self._local, "regions"):
            self._local.regions = []
        return self._local.regions


def arguments_of(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments of an operator by their names."""
    return {**dict(zip((x.name for x in func._schema.arguments), args, strict=False)), **kwargs}


def in_backward() -> bool:
    """Whether this thread runs a backward: a forward that runs is a recomputation."""
    return _backward_pass() != -1


def _backward_pass() -> int:
    """Id of the innermost backward pass of this thread; -1 outside of any."""
    return torch._C._current_graph_task_id()
