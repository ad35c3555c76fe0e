"""One rank of a small pipeline, counted: what its chunks keep, need and compute.

The pipeline has the schedule of the job, and one or two layers in each chunk. Its actions carry the
chunk that they are of, taken from the plan of the schedule; that the plan is what was executed is
checked on the way.
"""

from __future__ import annotations

import argparse
import contextlib
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed.errors import PlanError
from mindspeed.features.registry import planned_as
from mindspeed.instruments.clock import VirtualClock
from mindspeed.instruments.ledger import Communication
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.cluster.rates import DeviceRates
from mindspeed.planner.composed.segments import BETWEEN, Clock, Segment, Segments
from mindspeed.planner.counted.timed_step import BETWEEN_CHUNKS, between_chunks
from mindspeed.planner.job import Job, Overrides

if TYPE_CHECKING:
    from mindspeed.planner.counted.counted_step import CountedStep


@dataclass(frozen=True)
class Point:
    """One tiny run.

    Attributes:
        overrides: flags of the tiny job.
        devices: its ranks.
        stage: pipeline rank that is counted.
    """

    overrides: Overrides
    devices: int
    stage: int


@dataclass(frozen=True)
class ActionRun:
    """An action of the counted step.

    Attributes:
        op: as in a pipeline schedule.
        stage: of the pipeline, of which the rank has several with several chunks.
        level: bytes alive at its start beyond those between steps.
        peak: most bytes alive until the next action, beyond those between steps.
        dropped: bytes that were alive at its start and not at its end.
        seconds: by the clock; 0 without one.
    """

    op: str
    stage: int
    level: int
    peak: int
    dropped: int
    seconds: float


@dataclass(frozen=True)
class TinyRun:
    """Figures of one rank.

    Attributes:
        static: bytes between steps, by kind.
        parameters: entries on the rank.
        micro_batches: of the step.
        data_parallel: size.
        actions: in their order.
        tail: most bytes alive after the last action, beyond those between steps.
        tail_seconds: from the end of the last action to the end of the step.
        tail_exposed: part of them in which the rank waits for communication.
        flops: of the step.
        recomputed: part of them that is computed a second time.
        collectives: whole bytes of those of data-parallel groups, as ``dp all_gather``; those of
            experts as ``edp all_gather``.
        messages: until the last action ends, over other groups, if there is a clock: ``calls``,
            ``payload`` and ``wire``, as ``wire PIPELINE_MODEL_PARALLEL_GROUP|4|send`` with the
            group's size; within actions by their op: ``B wire TENSOR_MODEL_PARALLEL_GROUP|8|...``.
        closing: the same after the last action, of a step.
        exposed: seconds of waiting within actions, by op and description of the process group.
        host: bytes of host memory between steps.
    """

    static: Counter[str]
    parameters: int
    micro_batches: int
    data_parallel: int
    actions: tuple[ActionRun, ...]
    tail: int
    tail_seconds: float
    tail_exposed: float
    flops: int
    recomputed: int
    collectives: Counter[str]
    messages: Counter[str]
    closing: Counter[str]
    exposed: Counter[str]
    host: int = 0


@dataclass(frozen=True)
class Observation:
    """A step that was executed, before it is put into figures.

    Attributes:
        step: its counts.
        stages: op and stage of each action by the plan; None without a pipeline.
        data_parallel: size.
        segments: of the step, without gaps.
    """

    step: CountedStep
    stages: tuple[tuple[str, int], ...] | None
    data_parallel: int
    segments: tuple[Segment, ...]


def run(job: Job, point: Point, cluster: Cluster | None) -> TinyRun:
    """Count one rank of the tiny pipeline; changes the state of this process.

    Args:
        job: whose flags these are.
        point: which run.
        cluster: rates of a clock; None: no times.

    Raises:
        MindSpeedError: the job cannot start, or cannot be counted.
    """
    clock = None if cluster is None else VirtualClock.of(DeviceRates(cluster))
    return figures(observe(job, point, clock), clock)


def observe(
    job: Job, point: Point, clock: VirtualClock | None, times: Clock | None = None
) -> Observation:
    """Execute the step of a run; changes the state of this process.

    Args:
        job: whose flags these are.
        point: which run.
        clock: watches the step.
        times: of the segments' boundaries; those of the clock by default.

    Raises:
        MindSpeedError: the job cannot start, or cannot be counted.
    """
    from mindspeed.planner.counted.counted_step import count_step
    from mindspeed.training.fake_job import rank_in_stage

    args = job.settings(point.overrides, point.devices).args
    segments = Segments(times or clock)
    stages = _stages(args, point.stage)

    def watch(memory: Any) -> Any:
        stack = contextlib.ExitStack()
        if clock is not None:
            stack.enter_context(clock)
        stack.enter_context(segments.watching(memory))
        return stack

    short = first_may_be_short(args)
    step = count_step(args, rank_in_stage(args, point.stage), watch=watch, short=short)
    return Observation(step, stages, args.data_parallel_size, tuple(segments.found))


def first_may_be_short(args: argparse.Namespace) -> bool:
    """Whether a first step of one micro-batch leaves behind what a whole one does.

    Args:
        args: final values.
    """
    values = vars(args)
    if values.get("planned_loop") is not None or any(map(values.get, _WHOLE_FIRST)):
        return False
    return not planned_as("needs steps", values)


_WHOLE_FIRST = (
    "virtual_pipeline_model_parallel_size",
    "optimizer_cpu_offload",
    "cpu_offloading",
    "overlap_moe_expert_parallel_comm",
    "rampup_batch_size",
)
"""Arguments of Megatron's with which a first step must be whole, too."""


def figures(observed: Observation, clock: VirtualClock | None) -> TinyRun:
    """The figures of a step.

    Args:
        observed: the step.
        clock: whose intervals are those of the step; None: no times.

    Raises:
        PlanError: the schedule executed something else than its plan.
    """
    step, found = observed.step, list(observed.segments)
    timing = _Timing(clock, tuple(found))
    base = found[0].before
    actions = _actions(found, observed.stages, base)
    last = max(i for i, one in enumerate(found) if one.op != BETWEEN)
    tail = found[last + 1 :]
    return TinyRun(
        static=step.static,
        parameters=step.parameters,
        micro_batches=step.micro_batches,
        data_parallel=observed.data_parallel,
        actions=actions,
        tail=max(one.peak for one in tail) - base,
        tail_seconds=tail[-1].end - tail[0].start,
        tail_exposed=timing.waited(tail[0].start),
        flops=step.flops.total,
        recomputed=step.flops.recompute,
        collectives=_collectives(step.communications),
        messages=timing.messages(tail[0].start, closing=False),
        closing=timing.messages(tail[0].start, closing=True),
        exposed=timing.waits(tail[0].start),
        host=step.host_static,
    )


@dataclass(frozen=True)
class _Timing:
    """Intervals of the clock, if there is one."""

    clock: Any  # a VirtualClock or None
    segments: tuple[Segment, ...]

    def messages(self, end: float, closing: bool) -> Counter[str]:
        """Communication until or after ``end`` over groups that are not data-parallel."""
        found: Counter[str] = Counter()
        for interval in () if self.clock is None else self.clock.select("communication"):
            one = interval.communication
            if "DATA_PARALLEL" in one.description or len(one.ranks) < 2:
                continue
            within = interval.start < end or one.op == "send"  # one follows the last action
            if within != closing:
                name = f"{one.description}|{len(one.ranks)}|{one.op}"
                op = "" if closing else self._op(interval)
                found[f"{op}calls {name}"] += 1
                found[f"{op}payload {name}"] += one.payload
                found[f"{op}wire {name}"] += one.wire
        return found

    def _op(self, interval: Any) -> str:
        """The op within which it begins, and a space; empty for messages between actions."""
        if any(part in interval.communication.description for part in BETWEEN_CHUNKS):
            return ""
        index = bisect_right(self.segments, interval.start, key=lambda one: one.start) - 1
        op = self.segments[index].op
        return op if op == BETWEEN else f"{op} "

    def waits(self, end: float) -> Counter[str]:
        """Seconds in which chunks waited until ``end``, by op and description of the group."""
        found: Counter[str] = Counter()
        for one in self._select(0.0, end):
            if not between_chunks(one):
                found[self._op(one) + one.communication.description] += one.seconds
        return found

    def waited(self, start: float) -> float:
        """Seconds of all waiting from ``start`` on."""
        return sum(one.seconds for one in self._select(start, float("inf")))

    def _select(self, start: float, end: float) -> list[Any]:
        if self.clock is None:
            return []
        return [
            one
            for one in self.clock.select("wait")
            if start <= one.start < end and one.communication is not None
        ]


def _collectives(communications: tuple[Communication, ...]) -> Counter[str]:
    """Whole bytes of data-parallel collectives."""
    found: Counter[str] = Counter()
    for one in communications:
        if "DATA_PARALLEL" in one.description:
            group = "edp" if "EXPERT" in one.description else "dp"
            size = len(one.ranks) if one.op == "all_gather" else 1
            found[f"{group} {one.op}"] += one.payload * size
    return found


def _stages(args: argparse.Namespace, rank: int) -> tuple[tuple[str, int], ...] | None:
    """Op and stage of each action of the rank; None without a pipeline."""
    from mindspeed.pipeline.schedule.schedules import build_plan
    from mindspeed.training.pipeline_figures import micro_batches, request_of

    ranks = args.pipeline_model_parallel_size
    if ranks == 1:
        return None
    chunks = args.virtual_pipeline_model_parallel_size or 1
    plan = build_plan(request_of(args), ranks, chunks, micro_batches(args))
    return tuple((a.op, a.stage) for a in plan.rows[rank] if a.op not in "GOL")


def _actions(
    found: list[Segment], stages: tuple[tuple[str, int], ...] | None, base: int
) -> tuple[ActionRun, ...]:
    """The segments of actions; what comes between two of them belongs to the earlier one."""
    runs: list[ActionRun] = []
    head = 0
    ops = [one.op for one in found if one.op != BETWEEN]
    if stages is not None and [op for op, _ in stages] != ops:
        raise PlanError(
            f"the schedule's plan has {' '.join(op for op, _ in stages)}, executed was "
            f"{' '.join(ops)}"
        )
    order = iter(stages or [(op, 0) for op in ops])
    for index, one in enumerate(found):
        if one.op == BETWEEN:
            head = one.peak if not runs else 0
            continue
        op, stage = next(order)
        after = found[index + 1] if len(runs) + 1 < len(ops) else one
        runs.append(
            ActionRun(
                op,
                stage,
                one.before - base,
                max(one.peak, after.peak, head) - base,
                one.before - one.after,
                one.end - one.start,
            )
        )
        head = 0
    return tuple(runs)
