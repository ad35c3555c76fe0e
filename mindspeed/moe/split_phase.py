"""A collective in two halves: what is computed between them hides it, in both passes.

    y = start(x, collective, ticket)     # in flight
    z = shared_expert(h)
    y = finish(y, ticket)                # waits

Two autograd functions share a ticket. In backward ``finish`` launches the reverse collective and
``start`` waits for it; autograd runs what was computed between them in forward between them too,
because it takes ready nodes in the reverse order of their creation.

The reverse result has the shape of ``x``, not of ``y``, so ``finish`` hands on a placeholder
without memory in its place. Between the halves ``y`` must not be used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mindspeed import spmd
from mindspeed.moe.events import EventKind, EventLog
from mindspeed.spmd import ByArguments, Passes, typed


class InFlight(Protocol):
    """A communication in flight, such as ``torch.distributed.Work``."""

    def wait(self) -> Any:
        """Return when the result may be used."""
        ...


class Collective(Protocol):
    """A communication and its reverse."""

    def typed(self) -> spmd.Collective:
        """Rule for :mod:`mindspeed.spmd`."""
        ...

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Start it on ``x [rows, ...]``; returns what it fills, and the work (None: done)."""
        ...

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Start the reverse on ``grad [rows, ...]`` of the result; returns that of ``x``."""
        ...

    def rows(self, rows: int) -> int:
        """Rows of the result for ``rows`` rows."""
        ...


@dataclass(frozen=True)
class Unsent:
    """A collective whose result nothing reads, in a run without a backward: it isn't launched."""

    collective: Collective

    def typed(self) -> spmd.Collective:
        """Rule for :mod:`mindspeed.spmd`."""
        return self.collective.typed()

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Zeros without memory in place of what ``x [rows, ...]`` would bring."""
        return x.new_zeros(()).expand(self.collective.rows(len(x)), *x.shape[1:]), None

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """There is none, for gradients ``grad``."""
        raise NotImplementedError

    def rows(self, rows: int) -> int:
        """Rows of the result for ``rows`` rows."""
        return self.collective.rows(rows)


@dataclass(eq=False)
class Ticket:
    """The state that the two halves of one call share.

    Attributes:
        chunk: index of the chunk, for the log.
        before_reverse: called in backward before the reverse is launched.
        after_reverse: called after it is launched.
        before_wait: called in backward before the result of the reverse is waited for.
    """

    collective: Collective
    name: str = ""
    chunk: int = 0
    log: EventLog | None = None
    before_reverse: list[Callable[[], None]] = field(default_factory=list)
    after_reverse: list[Callable[[], None]] = field(default_factory=list)
    before_wait: list[Callable[[], None]] = field(default_factory=list)
    _work: InFlight | None = None
    _kept: Any = None  # what is being sent lives until the wait
    _result: torch.Tensor | None = None  # of the reverse

    def launch(self, x: torch.Tensor) -> torch.Tensor:
        """The first half in forward, on ``x [rows, ...]``."""
        self._kept = x
        y, self._work = self.collective.launch(x)
        self.note("forward", EventKind.START, x)
        return y

    def launch_reverse(self, grad: torch.Tensor) -> None:
        """The first half in backward, on ``grad [rows, ...]``."""
        for call in self.before_reverse:
            call()
        self._kept = grad
        self._result, self._work = self.collective.launch_reverse(grad)
        self.note("backward", EventKind.START, grad)
        for call in self.after_reverse:
            call()

    def wait(self, phase: str) -> None:
        """The second half of either pass."""
        self.note(phase, EventKind.FINISH)
        if self._work is not None:
            self._work.wait()
        self._work = self._kept = None

    def result(self) -> torch.Tensor:
        """The gradient that the reverse has brought, ``[rows, ...]``."""
        for call in self.before_wait:
            call()
        self.wait("backward")
        found, self._result = self._result, None
        assert found is not None
        return found

    def note(self, phase: str, kind: EventKind, x: torch.Tensor | None = None) -> None:
        """Add an event with the bytes of ``x [...]`` to the log, if there is one."""
        if self.log is not None:
            self.log.add(phase, kind, self.name, self.chunk, 0 if x is None else x.nbytes)


def start(x: torch.Tensor, ticket: Ticket) -> torch.Tensor:
    """Launch the ticket's collective on ``x``; :func:`finish` waits."""
    return _Start.apply(x, ticket)  # type: ignore[no-any-return]


def finish(y: torch.Tensor, ticket: Ticket) -> torch.Tensor:
    """Wait for ``y [rows, ...]``, which :func:`start` has returned, and return it."""
    return _Finish.apply(y, ticket)  # type: ignore[no-any-return]


@typed(ByArguments(lambda given: given["ticket"].collective.typed()))
class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ticket: Ticket) -> torch.Tensor:
        ctx.ticket = ticket
        return ticket.launch(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return ctx.ticket.result(), None


@typed(Passes())
class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, ticket: Ticket) -> torch.Tensor:
        ctx.ticket = ticket
        ticket.wait("forward")
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        ctx.ticket.launch_reverse(grad.contiguous())
        return grad.new_empty(()).expand(grad.shape), None
