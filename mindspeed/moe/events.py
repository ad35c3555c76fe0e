"""The log of an executed program: what computed and communicated in which order, in both passes.

log = EventLog()
...                                   # forward and backward of a layer
log.exposed("forward")                # collectives with no computation between start and finish
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed.spmd import Passes, typed


class EventKind(enum.Enum):
    START = ">"
    FINISH = "<"
    COMPUTE = ""


@dataclass(frozen=True)
class Event:
    """One event of this rank.

    Attributes:
        phase: "forward" or "backward".
        kind: start or finish of a communication, or a computation.
        bytes: that the communication was given.
    """

    phase: str
    kind: EventKind
    name: str
    chunk: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.name}{self.kind.value}"


@dataclass
class EventLog:
    """Events in the order in which they happened."""

    events: list[Event] = field(default_factory=list)

    def add(self, phase: str, kind: EventKind, name: str, chunk: int = 0, nbytes: int = 0) -> None:
        self.events.append(Event(phase, kind, name, chunk, nbytes))

    def of(self, phase: str) -> list[Event]:
        return [event for event in self.events if event.phase == phase]

    def communications(self, phase: str) -> list[Event]:
        """The starts of communications in one pass."""
        return [event for event in self.of(phase) if event.kind is EventKind.START]

    def exposed(self, phase: str) -> list[Event]:
        """The communications of a pass during which this rank computes nothing, of either pass."""
        found = []
        for i, event in enumerate(self.events):
            if event.kind is not EventKind.START or event.phase != phase:
                continue
            finish = (phase, EventKind.FINISH, event.name, event.chunk)
            for later in self.events[i + 1 :]:
                if later.kind is EventKind.COMPUTE:
                    break
                if (later.phase, later.kind, later.name, later.chunk) == finish:
                    found.append(event)
                    break
        return found


@typed(Passes())
class _Mark(torch.autograd.Function):
    """Returns its input; its backward runs when all later computations have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: EventLog, name: str, chunk: int) -> torch.Tensor:
        ctx.event = (log, name, chunk)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        log, name, chunk = ctx.event
        log.add("backward", EventKind.COMPUTE, name, chunk)
        return *grads, None, None, None


def mark(x: torch.Tensor, log: EventLog | None, name: str, chunk: int) -> torch.Tensor:
    """Let the backward of the computation that made ``x`` appear in the log."""
    if log is None or not x.requires_grad:
        return x
    return _Mark.apply(x, log, name, chunk)  # type: ignore[no-any-return]
