"""Costs of a modelled step, by layer and phase and as a timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed.instruments.clock import TimedCall
from mindspeed.instruments.timeline import Timeline

PHASES = ("forward", "recompute", "backward")
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


def by_layer(intervals: Iterable[TimedCall]) -> dict[str, dict[str, Costs]]:
    """Costs of every layer and phase; layers in the order in which they first run."""
    found: dict[str, dict[str, Costs]] = {}
    for interval in intervals:
        phases = found.setdefault(interval.scope, {})
        phases.setdefault(interval.phase, Costs()).add(interval)
    return found


def group_equal_layers(
    layers: dict[str, dict[str, Costs]],
) -> list[tuple[str, int, dict[str, Costs]]]:
    """Group layers with equal costs in every phase: their names, number, and costs of one."""
    groups: dict[Any, list[str]] = {}
    for name, phases in layers.items():
        figures = tuple((phase, phases[phase].figures) for phase in PHASES if phase in phases)
        groups.setdefault((name.rpartition(" ")[0], figures), []).append(name)
    return [(joined_names(names), len(names), layers[names[0]]) for names in groups.values()]


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
        shown.append(replace(one, name=name, details=(("layer", one.scope), figure)))
        found.add(one.lane)
    first = [lane for lane in ("operators", "waiting") if lane in found]
    return Timeline(shown, [*first, *sorted(found.difference(first))])


def joined_names(names: list[str]) -> str:
    """Join ``layer 1``, ``layer 2``, ``layer 3``, ``layer 7`` to ``layers 1-3, 7``."""
    kind, _, first = names[0].rpartition(" ")
    if len(names) == 1 or not first.isdigit():
        return names[0]
    numbers = sorted(int(name.rpartition(" ")[2]) for name in names)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return f"{kind}s " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
