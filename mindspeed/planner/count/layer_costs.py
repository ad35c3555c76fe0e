"""Costs of a modelled step, by part and phase and as a timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed.instruments.clock import TimedCall
from mindspeed.instruments.timeline import Timeline

PHASES = ("forward", "recompute", "backward")


@dataclass(frozen=True)
class Scope:
    """A part of the step of a rank.

    Attributes:
        what: ``layer``, ``prediction layer``, ``chunk`` for the rest of a chunk (embedding, final
            norm, output layer, loss), or a part outside of chunks.
        chunk: index of the model chunk; None outside.
        layer: its number in the model, from 1; None for the rest of a chunk.
    """

    what: str
    chunk: int | None = None
    layer: int | None = None

    def __str__(self) -> str:
        return joined([self])


START, GRADIENTS, OPTIMIZER = Scope("start of the step"), Scope("gradients"), Scope("optimizer")
NANOSECOND = 1e-9


@dataclass
class Costs:
    """Costs of one layer in one phase.

    Attributes:
        calls: number of calls, by collective.
        sent: bytes that this rank sends, by collective.
        flops: FLOPs of operators with a formula.
        computing: modelled seconds of these operators.
        exposed: modelled seconds in which the rank waits for communication.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    computing: float = 0.0
    exposed: float = 0.0

    def add(self, interval: TimedCall) -> None:
        """Count one interval."""
        found = interval.communication
        if interval.kind == "compute":
            self.flops += interval.flops
            self.computing += interval.seconds
        elif interval.kind == "wait":
            self.exposed += interval.seconds
        elif found is not None and found.op != "barrier":
            self.calls[found.op] += 1
            self.sent[found.op] += found.wire

    @property
    def figures(self) -> tuple[Any, ...]:
        """Comparison key of costs; seconds are rounded to nanoseconds."""
        seconds = (round(value / NANOSECOND) for value in (self.computing, self.exposed))
        counted = (tuple(sorted(counter.items())) for counter in (self.calls, self.sent))
        return *counted, self.flops, *seconds


def by_scope(intervals: Iterable[TimedCall]) -> dict[Scope, dict[str, Costs]]:
    """Costs of every part and phase; parts in the order in which they first run."""
    found: dict[Scope, dict[str, Costs]] = {}
    for interval in intervals:
        phases = found.setdefault(interval.scope, {})
        phases.setdefault(interval.phase, Costs()).add(interval)
    return found


def group_equal_layers(
    scopes: Mapping[Scope, dict[str, Costs]],
) -> list[tuple[str, dict[str, Costs]]]:
    """Group layers of a chunk with equal costs in every phase: their names, and costs of one."""
    groups: dict[Any, list[Scope]] = {}
    for scope, phases in scopes.items():
        figures = tuple((phase, phases[phase].figures) for phase in PHASES if phase in phases)
        chunk = None if scope.layer is None else scope.chunk
        groups.setdefault((scope.what, chunk, figures), []).append(scope)
    return [(joined(group), scopes[group[0]]) for group in groups.values()]


def total(intervals: Iterable[TimedCall]) -> Costs:
    """Sum the costs of all intervals."""
    costs = Costs()
    for interval in intervals:
        costs.add(interval)
    return costs


def lanes(intervals: Iterable[TimedCall]) -> Timeline:
    """Build a timeline: a lane for operators, one for waits, one for each process group."""
    shown, found = [], set()
    for one in intervals:
        call = one.communication
        figure = ("flops", one.flops) if call is None else ("bytes sent", call.wire)
        name = one.name if call is None else call.op
        shown.append(replace(one, name=name, details=(("layer", str(one.scope)), figure)))
        found.add(one.lane)
    first = [lane for lane in ("operators", "waiting") if lane in found]
    return Timeline(shown, [*first, *sorted(found.difference(first))])


def joined(scopes: Sequence[Scope]) -> str:
    """Name parts of one kind: ``chunks 0-1, layers 1-3, 7``."""
    first = scopes[0]
    if first.chunk is None:
        return first.what
    names = [_numbered("chunk", {one.chunk for one in scopes})]
    if first.layer is not None:
        names.append(_numbered(first.what, {one.layer for one in scopes}))
    return ", ".join(names)


def _numbered(kind: str, numbers: Collection[Any]) -> str:
    if len(numbers) == 1:
        return f"{kind} {next(iter(numbers))}"
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return f"{kind}s " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
