"""Models of time for :class:`mindspeed.instruments.clock.VirtualClock`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mindspeed.instruments.ledger import Communication


@dataclass(frozen=True)
class Link:
    """Link model of a process group.

    Attributes:
        bytes_per_second: that one rank sends.
        latency: seconds added to every call.
    """

    bytes_per_second: float
    latency: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Time of one communication that puts ``nbytes`` on the wire."""
        return self.latency + nbytes / self.bytes_per_second


@dataclass(frozen=True)
class Call:
    """A call of an operator that has run.

    Attributes:
        func: the overload.
        args: positional arguments.
        kwargs: the others.
        result: what it returned.
        flops: by its formula; 0 without one.
        nbytes: read and written.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    flops: int
    nbytes: int


class Rates(Protocol):
    """A model of time."""

    @property
    def slowdown(self) -> float:
        """How many times as long computation takes while communication runs."""

    def operator(self, call: Call) -> float:
        """Seconds of an operator, which may be 0; not of communications."""

    def communication(self, communication: Communication) -> float:
        """Seconds of a communication once it has started."""

    def stream(self, communication: Communication) -> str:
        """Communications with the same answer run one after the other."""


@dataclass(frozen=True)
class SimpleRates:
    """FLOPs and, where ``memory`` is given, bytes of operators; one link per process group."""

    flops_per_second: float
    link_of: Callable[[Communication], Link]
    memory: float | None
    slowdown: float = 1.0

    def operator(self, call: Call) -> float:
        """Computation, else bytes."""
        if call.flops:
            return call.flops / self.flops_per_second
        return call.nbytes / self.memory if self.memory is not None else 0.0

    def communication(self, communication: Communication) -> float:
        """Latency and bytes on the wire."""
        return self.link_of(communication).seconds(communication.wire)

    def stream(self, communication: Communication) -> str:
        """Its process group."""
        return communication.group
