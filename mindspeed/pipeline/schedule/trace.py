"""An executed step: when every action of every rank ran, and what follows from it.

Each rank writes a file with its row and the times of its actions, from a barrier at the start of
the step. Together they are a timeline that is drawn under the plan, and costs by which the next
run places its actions.

    trace = read_trace(folder)
    trace.costs()          # F, I, W of a rank, latency, shares of the stages
    trace.late_stage()     # that all others wait for
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text
from mindspeed.instruments.timeline import Timeline
from mindspeed.parsing import read_json
from mindspeed.pipeline.schedule.actions import BACKWARDS, FORWARDS, Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.csv_file import read_plan, write_plan
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.simulate import TimedAction, simulate

PLAN = "plan.csv"
_WAITED = 1e-6  # seconds between two actions of a rank that are no wait for a message
_LATE = 1.05  # of the mean stage


def write_rank(
    folder: Path, plan: Plan, rank: int, step: int, times: Sequence[TimedAction]
) -> None:
    """Write what one rank of a pipeline did; the first one writes the plan, too."""
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        write_plan(folder / PLAN, plan)
    entries = [[str(action), start, end] for action, start, end in times]
    found = {"step": step, "actions": entries}
    atomic_write_text(folder / f"rank-{rank}.json", json.dumps(found) + "\n")


@dataclass(frozen=True)
class Trace:
    """An executed step.

    Attributes:
        plan: that ran.
        step: its number.
        rows: for each rank its actions in order, in seconds from the start of the step.
    """

    plan: Plan
    step: int
    rows: tuple[tuple[TimedAction, ...], ...]

    @property
    def seconds(self) -> float:
        """Time to the end of the last action."""
        return max(row[-1].end for row in self.rows if row)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds in which each rank computes nothing."""
        return tuple(self.seconds - sum(end - start for _, start, end in row) for row in self.rows)

    def stage_seconds(self) -> dict[str, tuple[float, ...]]:
        """Mean seconds of each op, by stage; nothing of an op that no stage has."""
        found: dict[str, list[list[float]]] = {}
        stages = self.plan.placement.num_stages
        for row in self.rows:
            for action, start, end in row:
                if action.microbatch is not None and self._alone(action):
                    of_stages = found.setdefault(action.op, [[] for _ in range(stages)])
                    of_stages[action.stage].append(end - start)
        return {op: tuple(fmean(one or [0.0]) for one in each) for op, each in found.items()}

    def work(self) -> tuple[float, ...]:
        """Seconds of one micro-batch in each stage, forward and backward."""
        seconds = self.stage_seconds()
        backward = _whole(seconds)
        forward = seconds.get("F") or seconds["Fc"]
        return tuple(f + b for f, b in zip(forward, backward, strict=True))

    def late_stage(self) -> tuple[int, float] | None:
        """The stage that takes longest, as a multiple of the mean, if it is longer than it."""
        work = self.work()
        longest = max(range(len(work)), key=work.__getitem__)
        factor = work[longest] / fmean(work)
        return (longest, factor) if factor > _LATE else None

    def costs(self) -> Costs:
        """Those with which the simulation of the plan takes this time.

        Whole backwards do not tell I from W: both get a half.
        """
        seconds, work = self.stage_seconds(), self.work()
        ranks = self.plan.placement.ranks
        forward = sum(seconds.get("F") or seconds["Fc"]) / ranks
        backward = sum(_whole(seconds)) / ranks
        part = 0.5
        if "I" in seconds and "W" in seconds:
            halves = [(i, w) for i, w in zip(seconds["I"], seconds["W"], strict=True) if i and w]
            part = sum(i for i, _ in halves) / sum(i + w for i, w in halves)
        return Costs(
            forward,
            backward * part,
            backward * (1 - part),
            latency=self.latency(),
            stage_shares=tuple(one * ranks / sum(work) for one in work),
        )

    def latency(self) -> float:
        """Median seconds from the end of an action to the start of one that waited for it."""
        ends = {action: end for row in self.rows for action, _, end in row}
        found = []
        for rank, row in enumerate(self.rows):
            free = 0.0
            for action, start, end in row:
                source = self._source(action, ends)
                if source is not None and self.plan.placement.rank(source.stage) != rank:
                    sent = ends[source]
                    if start - free > _WAITED and sent > free:
                        found.append(start - sent)
                free = end
        return max(0.0, median(found)) if found else 0.0

    def timelines(self, costs: Costs | None = None) -> dict[str, Timeline]:
        """The plan with measured costs, and the step."""
        planned = simulate(self.plan, costs or self.costs())
        return {"plan": planned.lanes, "step": self._lanes()}

    def _lanes(self) -> Timeline:
        lanes, placement = list(map(str, range(len(self.rows)))), self.plan.placement
        intervals = [
            one.interval(lane, placement)
            for lane, row in zip(lanes, self.rows, strict=True)
            for one in row
            if one.end > one.start
        ]
        return Timeline(intervals, lanes, "rank", {}, (self.seconds,))

    def _alone(self, action: Action) -> bool:
        """Whether an action is no member of a pair, whose times are of both."""
        return action not in self._paired

    @cached_property
    def _paired(self) -> frozenset[Action]:
        found = set(self.plan.paired)
        for rank in range(len(self.plan.rows)):
            found.update(one[1] for one in self.plan.entries(rank) if len(one) == 2)
        return frozenset(found)

    def _source(self, action: Action, ends: dict[Action, float]) -> Action | None:
        """The action of the stage before whose result this one needs."""
        if action.op in FORWARDS:
            ops, before = FORWARDS, action.stage - 1
        elif action.op in BACKWARDS:
            ops, before = BACKWARDS, action.stage + 1
        else:
            return None
        sources: Iterator[Action] = (Action(op, before, action.microbatch) for op in ops)
        return next((one for one in sources if one in ends), None)


def _whole(seconds: dict[str, tuple[float, ...]]) -> tuple[float, ...]:
    """Seconds of a backward of each stage, whole or in two halves."""
    stages = len(next(iter(seconds.values())))
    nothing = (0.0,) * stages
    whole, i, w = (seconds.get(op, nothing) for op in ("B", "I", "W"))
    return tuple(b or i + w for b, i, w in zip(whole, i, w, strict=True))


def read_trace(folder: Path) -> Trace:
    """What the ranks of a pipeline wrote.

    Raises:
        ConfigError: a file is missing, is no such file, or of another step or plan.
    """
    plan = read_plan(folder / PLAN)
    rows, steps = [], set()
    for rank, row in enumerate(plan.rows):
        file = folder / f"rank-{rank}.json"
        found = read_json(file, f"trace {file}")
        times = tuple(_entry(file, one) for one in _actions(file, found))
        if tuple(one.action for one in times) != row:
            raise ConfigError(f"{file}: its actions are not those of rank {rank} of {PLAN}")
        rows.append(times)
        steps.add(found["step"])
    if len(steps) != 1:
        raise ConfigError(f"{folder}: the files are of steps {sorted(steps)}; trace one run")
    return Trace(plan, steps.pop(), tuple(rows))


def _actions(file: Path, found: Any) -> list[Any]:
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        raise ConfigError(f"{file}: no trace of --pipeline-trace")
    actions = found.get("actions")
    if not isinstance(actions, list):
        raise ConfigError(f"{file}: it has no actions")
    return actions


def _entry(file: Path, entry: Any) -> TimedAction:
    try:
        name, start, end = entry
        return TimedAction(Action.parse(name), float(start), float(end))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file}: {entry!r} is no action with start and end") from error
