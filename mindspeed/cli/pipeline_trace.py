"""The timelines of pipeline schedules for chrome://tracing and https://ui.perfetto.dev.

Each schedule is a process, each rank a thread, its reductions and copies a thread below it. A unit
of the costs is shown as a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed.files import atomic_write_text
from mindspeed.pipeline.schedule.simulate import Interval, Simulation

_MICROSECONDS = 1e6


def write_trace(simulations: Mapping[str, Simulation], output: Path, title: str) -> None:
    """Write a trace.

    Args:
        simulations: by the name of the schedule.
        output: JSON file to write.
        title: Kept in the file.
    """
    events = [
        event
        for process, (name, simulation) in enumerate(simulations.items())
        for event in _process(process, name, simulation)
    ]
    atomic_write_text(output, json.dumps({"traceEvents": events, "otherData": {"title": title}}))


def _process(process: int, name: str, simulation: Simulation) -> Iterator[dict[str, Any]]:
    yield _named("process_name", process, 0, name)
    for rank, row in enumerate(simulation.timeline):
        for thread, label, intervals in (
            (2 * rank, f"rank {rank}", row),
            (2 * rank + 1, f"rank {rank}, background", simulation.background[rank]),
        ):
            shown = [one for one in intervals if one.end > one.start]
            if shown:
                yield _named("thread_name", process, thread, label)
            for one in shown:
                yield _event(
                    process, thread, one, simulation.plan.placement.chunk(one.action.stage)
                )


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _event(process: int, thread: int, interval: Interval, chunk: int) -> dict[str, Any]:
    action, start, end = interval
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": str(action),
        "cat": action.op,
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "args": {"stage": action.stage, "chunk": chunk, "micro-batch": action.microbatch},
    }
