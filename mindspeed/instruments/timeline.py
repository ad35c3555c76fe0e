"""What runs when on lanes side by side: data, as text, and as a Chrome trace.

    line = Timeline([Interval("compute", "compute", "attention", 0.0, 2e-3)])
    print(text(line, width=100))
    write_trace({"layer": line}, Path("layer.json"), "one layer")

:mod:`mindspeed.instruments.clock` measures intervals; simulations of pipelines and of
mixture-of-experts layers predict them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mindspeed.files import atomic_write_text

_NARROWEST = 40
_MICROSECONDS = 1e6


@dataclass(frozen=True)
class Interval:
    """Something that takes time.

    Attributes:
        lane: what it occupies: a rank, a stream, a process group.
        kind: such as "compute", "communication" or "wait".
        name: of the operator, stage or action.
        start: seconds, or the unit of the costs.
        phase: "forward", "backward" or "recompute", if it belongs to one.
        details: further figures, shown in traces.
    """

    lane: str
    kind: str
    name: str
    start: float
    end: float
    phase: str = ""
    details: tuple[tuple[str, object], ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def detail(self, name: str) -> Any:
        """One of the details; None if there is none of that name."""
        return dict(self.details).get(name)


@dataclass(frozen=True)
class Timeline:
    """Intervals and their lanes.

    Attributes:
        intervals: in any order.
        lanes: from top to bottom; default: in the order in which they occur.
        lane_title: what a lane is, such as "rank".
        thin: lanes that a picture draws at the bottom of another one, and text leaves out.
        marks: moments that divide the timeline, such as the start of backward.
        window: the part that a picture shows; default: all.
    """

    intervals: Sequence[Interval]
    lanes: Sequence[str] = ()
    lane_title: str = ""
    thin: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[float, ...] = ()
    window: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not self.lanes:
            found = dict.fromkeys(one.lane for one in self.intervals)
            object.__setattr__(self, "lanes", tuple(found))

    @property
    def end(self) -> float:
        """End of the last interval of a lane that is not thin."""
        return max((one.end for one in self.intervals if one.lane not in self.thin), default=0.0)

    @property
    def full_lanes(self) -> list[str]:
        """Lanes that are not thin."""
        return [lane for lane in self.lanes if lane not in self.thin]

    @cached_property
    def by_lane(self) -> dict[str, list[Interval]]:
        """Intervals that last, by lane and start."""
        found: dict[str, list[Interval]] = {lane: [] for lane in self.lanes}
        for one in sorted(self.intervals, key=lambda one: one.start):
            if one.end > one.start and one.lane in found:
                found[one.lane].append(one)
        return found


def text(
    line: Timeline,
    width: int,
    name_of: Callable[[Interval], str] = lambda one: one.name,
    *,
    idle: str = " ",
    whole_names: bool = False,
) -> str:
    """Draw a timeline with one line per lane, time to the right; waits are dots.

    Args:
        idle: where nothing runs.
        whole_names: take more columns if names would be cut otherwise.
    """
    lanes = {lane: line.by_lane[lane] for lane in line.full_lanes}
    label = max(map(len, lanes), default=0) + 1
    scale = (max(width, _NARROWEST) - label) / max(line.end, 1e-12)
    if whole_names:
        every = (one for found in lanes.values() for one in found)
        scale = max([scale, *((len(name_of(one)) + 1) / one.seconds for one in every)])
    marks = {round(mark * scale) for mark in line.marks if mark < line.end}
    lines = []
    for lane, intervals in lanes.items():
        cells = ""
        for one in intervals:
            start, end = round(one.start * scale), round(one.end * scale)
            cells += _gap(len(cells), start, idle, marks)
            if (room := end - len(cells)) > 0:
                name = name_of(one)[: room - 1].ljust(room - 1, "-") + " "
                cells += "." * room if one.kind == "wait" else name
        cells += _gap(len(cells), max(marks, default=-1) + 1, " ", marks)
        lines.append((lane.ljust(label) + cells).rstrip())
    return "\n".join(lines)


def _gap(start: int, end: int, idle: str, marks: set[int]) -> str:
    return "".join("|" if place in marks else idle for place in range(start, end))


def write_trace(timelines: Mapping[str, Timeline], output: Path, title: str) -> None:
    """Write timelines for chrome://tracing and https://ui.perfetto.dev.

    Each timeline is a process and each lane a thread.

    Args:
        timelines: by their names, in seconds; any other unit is shown as seconds.
    """
    events = [
        event
        for process, (name, line) in enumerate(timelines.items())
        for event in _events(process, name, line)
    ]
    atomic_write_text(output, json.dumps({"traceEvents": events, "otherData": {"title": title}}))


def _events(process: int, name: str, line: Timeline) -> Iterator[dict[str, Any]]:
    yield _named("process_name", process, 0, name)
    for thread, (lane, intervals) in enumerate(line.by_lane.items()):
        if intervals:
            yield _named("thread_name", process, thread, f"{line.lane_title} {lane}".strip())
        for one in intervals:
            yield {
                "ph": "X",
                "pid": process,
                "tid": thread,
                "name": one.name,
                "cat": one.kind,
                "ts": one.start * _MICROSECONDS,
                "dur": one.seconds * _MICROSECONDS,
                "args": ({"phase": one.phase} if one.phase else {}) | dict(one.details),
            }


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
