"""Figures of a modelled step: by layer and phase, and as a Chrome trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mindspeed.instruments.clock import Interval

PHASES = ("forward", "recompute", "backward")
NANOSECOND = 1e-9


@dataclass
class Costs:
    """Costs of one layer in one phase.

    Attributes:
        calls: of each collective.
        sent: bytes that this rank puts on the wire, by collective.
        flops: of operators with a formula.
        computing: modelled seconds of these operators.
        exposed: modelled seconds in which the rank waits for communication.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    computing: float = 0.0
    exposed: float = 0.0

    def add(self, interval: Interval) -> None:
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
        """Equal for layers that cost the same; seconds to the nanosecond."""
        seconds = (round(value / NANOSECOND) for value in (self.computing, self.exposed))
        counted = (tuple(sorted(counter.items())) for counter in (self.calls, self.sent))
        return *counted, self.flops, *seconds


def by_layer(intervals: Iterable[Interval]) -> dict[str, dict[str, Costs]]:
    """Costs of every layer and phase; layers in the order in which they first run."""
    found: dict[str, dict[str, Costs]] = {}
    for interval in intervals:
        phases = found.setdefault(interval.scope, {})
        phases.setdefault(interval.phase, Costs()).add(interval)
    return found


def alike(layers: dict[str, dict[str, Costs]]) -> list[tuple[str, int, dict[str, Costs]]]:
    """Layers that cost the same in every phase, together: names, how many, costs of one."""
    groups: dict[Any, list[str]] = {}
    for name, phases in layers.items():
        figures = tuple((phase, phases[phase].figures) for phase in PHASES if phase in phases)
        groups.setdefault((name.rpartition(" ")[0], figures), []).append(name)
    return [(joined_names(names), len(names), layers[names[0]]) for names in groups.values()]


def total(intervals: Iterable[Interval]) -> Costs:
    """Costs of everything."""
    costs = Costs()
    for interval in intervals:
        costs.add(interval)
    return costs


def chrome_trace(intervals: Iterable[Interval], title: str) -> dict[str, Any]:
    """Events for chrome://tracing and https://ui.perfetto.dev, in microseconds.

    A lane for operators, one for waits, and one for each process group.
    """
    lanes: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for interval in intervals:
        lane = lane_of(interval)
        if lane not in lanes:
            lanes[lane] = len(lanes)
            events.append(
                {"ph": "M", "pid": 0, "tid": lanes[lane], "name": "thread_name"}
                | {"args": {"name": lane}}
            )
        found = interval.communication
        details = {"bytes sent": found.wire} if found is not None else {"flops": interval.flops}
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": lanes[lane],
                "name": found.op if found is not None else interval.name,
                "ts": interval.start * 1e6,
                "dur": interval.seconds * 1e6,
                "args": {"layer": interval.scope, "phase": interval.phase, **details},
            }
        )
    return {"traceEvents": events, "otherData": {"title": title}}


def lane_of(interval: Interval) -> str:
    """The row of a timeline that an interval belongs to."""
    if interval.communication is None:
        return "operators"
    if interval.kind == "wait":
        return "waiting"
    return _plain(interval.communication.description) or "default group"


def _plain(description: str) -> str:
    """``TENSOR_MODEL_PARALLEL_GROUP`` -> ``tensor model parallel``."""
    return description.removesuffix("_GROUP").replace("_", " ").lower()


def joined_names(names: list[str]) -> str:
    """``layer 1``, ``layer 2``, ``layer 3``, ``layer 7`` -> ``layers 1-3, 7``."""
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
