"""Recomputed regions of a layer, and the communication that their second run does without.

Recomputation runs a region once in forward and again in backward, where only the tensors that
autograd saves matter. In the second run

* nothing reads the output y of the linear layer that closes the region: what follows is
  ``residual + dropout(y + bias)``, and its gradient does not depend on y. Neither its product nor
  its collective runs (:func:`output_unread`). Where experts close it, these are the second linear
  layers of all experts, and what brings their results back (:func:`results_unread`);
* column-parallel layers save the inputs that they gather (:func:`keeps_gathered_inputs`), so the
  backward that follows does not gather them again;
* that backward gathers the gradient of the closing layer first. It is known when the second run
  begins, so it is gathered right after the last gather of the region, while the region computes
  (:func:`ahead_of`). Earlier, it would delay the gathers that the region waits for: a link serves
  collectives in order.

Linear layers ask these functions; the code that recomputes enters ``first_run`` and ``second_run``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WHOLE = "_whole_linear"
"""Attribute of a part of a linear layer: the layer."""
Gather = Callable[[], tuple[torch.Tensor, Any]]
"""Starts a gather; returns the tensor and the handle to wait for."""


@dataclass(frozen=True)
class Closing:
    """Modules whose outputs a region only sums and adds to the residual.

    Attributes:
        linears: A linear layer each, then the modules around it that return this output.
        experts: A mixture-of-experts layer; None: no experts close the region.
    """

    linears: Sequence[Sequence[torch.nn.Module]] = ()
    experts: torch.nn.Module | None = None


class RecomputedRegion:
    """One call of a recomputed region.

    Args:
        closing: What closes it; nothing if it is empty.
    """

    def __init__(self, closing: Closing = Closing()) -> None:
        self.closing = closing
        self.gathers = 0

    @contextlib.contextmanager
    def first_run(self) -> Iterator[None]:
        """Context of the run in forward."""
        run = _Run(self, second=False)
        with _entered(run):
            yield
        self.gathers = run.gathers

    @contextlib.contextmanager
    def second_run(self) -> Iterator[None]:
        """Context of the run in backward."""
        ahead = None
        if self.gathers:
            ahead, _threads.ahead = _threads.ahead, None
        with _entered(_Run(self, second=True, ahead=ahead)):
            yield


@dataclass
class AheadGather:
    """A gather that backward needs after the second run, and that may start during it.

    Attributes:
        started: What ``start`` returned; None: it has not been called.
    """

    start: Gather
    started: tuple[torch.Tensor, Any] | None = None

    def begin(self) -> None:
        self.started = self.start()


@dataclass
class _Run:
    region: RecomputedRegion
    second: bool
    gathers: int = 0
    ahead: AheadGather | None = None


class _Threads(threading.local):
    """State of one thread: backward may run in another than forward."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self.ahead: AheadGather | None = None


_threads = _Threads()


@contextlib.contextmanager
def _entered(run: _Run) -> Iterator[None]:
    _threads.runs.append(run)
    try:
        yield
    finally:
        _threads.runs.pop()


def keeps_gathered_inputs() -> bool:
    """Whether a region is running, so that a gathered input may be saved: it is dropped in the
    first run, and there again when backward begins."""
    return bool(_threads.runs)


def output_unread(module: torch.nn.Module) -> bool:
    """Whether nothing reads what ``module`` computes now: it closes the region in its second run.

    A forward hook of the layer, or of a module around it, may read its output.

    Args:
        module: A linear layer, or a part of one with some of its experts.
    """
    whole = vars(module).get(WHOLE, module)
    return any(
        chain[0] is whole and not any(one._forward_hooks for one in chain)
        for chain in _closing().linears
    )


def results_unread() -> bool:
    """Whether nothing reads the experts' results: a layer of them closes a region in its second
    run, so that what brings them back to their tokens needs not run."""
    layer = _closing().experts
    return layer is not None and not layer._forward_hooks


def _closing() -> Closing:
    """What closes the region that runs for the second time; nothing in other runs."""
    if not _threads.runs or not _threads.runs[-1].second:
        return Closing()
    return _threads.runs[-1].region.closing


def next_gather() -> AheadGather | None:
    """Count a gather of the region that is running; return the one to begin right after it."""
    if not _threads.runs:
        return None
    run = _threads.runs[-1]
    run.gathers += 1
    return run.ahead if run.second and run.gathers == run.region.gathers else None


@contextlib.contextmanager
def ahead_of(start: Gather) -> Iterator[AheadGather]:
    """Let a second run that begins in this block start the gather after its own last one."""
    before, gather = _threads.ahead, AheadGather(start)
    _threads.ahead = gather
    try:
        yield gather
    finally:
        _threads.ahead = before
