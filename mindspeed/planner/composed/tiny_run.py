"""One rank of a small pipeline, counted: what its chunks keep, need and compute.

The pipeline has the schedule of the job, and one or two layers in each chunk. The plan of the
schedule tells the chunk of each action; a run that executed anything else is refused.
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
from mindspeed.planner.cluster.program import program_of
from mindspeed.planner.cluster.rates import DeviceRates
from mindspeed.planner.composed.figures import END, TRAFFIC, Figure, Quantity
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
        devices: number of its ranks.
        stage: pipeline rank to count.
    """

    overrides: Overrides
    devices: int
    stage: int


@dataclass(frozen=True)
class ActionRun:
    """An action of the counted step.

    Attributes:
        op: op of the pipeline schedule.
        stage: pipeline stage; a rank with several chunks has several.
        level: bytes alive at its start beyond those between steps.
        peak: largest number of bytes alive until the next action, beyond those between steps.
        dropped: bytes alive at its start minus those at its end.
        seconds: duration by the clock; 0 without one.
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
        parameters: parameters on the rank.
        micro_batches: micro-batches of the step.
        data_parallel: data-parallel size.
        actions: actions in execution order.
        tail: largest number of bytes alive after the last action, beyond those between steps.
        tail_seconds: seconds from the end of the last action to the end of the step.
        tail_exposed: seconds of these in which the rank waits for communication.
        flops: FLOPs of the step.
        recomputed: FLOPs of these that are executed a second time.
        communication: unsharded bytes of data-parallel collectives; with a clock, traffic of other
            groups and seconds of waiting for them before the end of the last action, by the op in
            which they occur; traffic after it, with size 0 for groups that grow with the job.
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
    communication: Counter[Figure]
    host: int = 0


@dataclass(frozen=True)
class Observation:
    """An executed step.

    Attributes:
        step: its counts.
        stages: op and stage of each action by the plan; None without a pipeline.
        data_parallel: data-parallel size.
        segments: segments of the step, without gaps.
    """

    step: CountedStep
    stages: tuple[tuple[str, int], ...] | None
    data_parallel: int
    segments: tuple[Segment, ...]


def run(job: Job, point: Point, cluster: Cluster | None) -> TinyRun:
    """Count one rank of the tiny pipeline; changes the state of this process.

    Raises:
        MindSpeedError: the job cannot start, or cannot be counted.
    """
    rates = None if cluster is None else DeviceRates(cluster)
    clock = None if rates is None else VirtualClock.of(rates)
    return figures(observe(job, point, clock, rates=rates), clock)


def observe(
    job: Job,
    point: Point,
    clock: VirtualClock | None,
    times: Clock | None = None,
    rates: DeviceRates | None = None,
) -> Observation:
    """Execute the step of a run; changes the state of this process.

    Args:
        job: the job whose flags ``point`` overrides.
        point: the run.
        clock: clock that times the step.
        times: clock of the segments' boundaries; default: ``clock``.
        rates: of the clock, which get the program of the job.

    Raises:
        MindSpeedError: the job cannot start, or cannot be counted.
    """
    from mindspeed.planner.counted.counted_step import count_step
    from mindspeed.training.fake_job import rank_in_stage

    args = job.settings(point.overrides, point.devices).args
    if rates is not None:
        rates.program = program_of(args)
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
    """Whether a first step of one micro-batch creates all states that a whole one does."""
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
"""Megatron's arguments that require a whole first step."""


def figures(observed: Observation, clock: VirtualClock | None) -> TinyRun:
    """Build the figures of a step from its counts and the clock's intervals, if any.

    Raises:
        PlanError: the executed actions are not those of the schedule's plan.
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
        communication=_collectives(step.communications) + timing.traffic(tail[0].start),
        host=step.host_static,
    )


@dataclass(frozen=True)
class _Timing:
    """Intervals of the clock, if there is one."""

    clock: Any  # a VirtualClock or None
    segments: tuple[Segment, ...]

    def traffic(self, end: float) -> Counter[Figure]:
        """Communication over groups that are not data-parallel, and waits of chunks until ``end``.

        Args:
            end: time at which the last action ends.
        """
        found: Counter[Figure] = Counter()
        for interval in () if self.clock is None else self.clock.select("communication"):
            one = interval.communication
            name, size = one.description, len(one.ranks)
            if "DATA_PARALLEL" in name or size < 2:
                continue
            within = interval.start < end or one.op == "send"  # one follows the last action
            op = self._op(interval) if within else END
            if not within and name.startswith(_GROWING):
                size = 0
            for quantity, value in zip(TRAFFIC, (1, one.payload, one.wire), strict=True):
                found[Figure(quantity, op, name, size, one.op)] += value
        for wait in self._select(0.0, end):
            if not between_chunks(wait):
                key = Figure(Quantity.WAIT, self._op(wait), wait.communication.description)
                found[key] += wait.seconds
        return found

    def _op(self, interval: Any) -> str:
        """The op of the action in which an interval begins; empty between actions."""
        if any(part in interval.communication.description for part in BETWEEN_CHUNKS):
            return BETWEEN
        index = bisect_right(self.segments, interval.start, key=lambda one: one.start) - 1
        return self.segments[index].op

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


_GROWING = ("INTRA_DISTRIBUTED", "MODEL_PARALLEL", "PIPELINE", "EXPERT_TENSOR_MODEL_PIPELINE")
"""Prefixes of the descriptions of groups whose size grows with the job."""


def _collectives(communications: tuple[Communication, ...]) -> Counter[Figure]:
    """Unsharded bytes of data-parallel collectives."""
    found: Counter[Figure] = Counter()
    for one in communications:
        if "DATA_PARALLEL" in one.description:
            experts = "EXPERT" in one.description
            quantity = Quantity.EXPERT_BYTES if experts else Quantity.DENSE_BYTES
            size = len(one.ranks) if one.op == "all_gather" else 1
            found[Figure(quantity, collective=one.op)] += one.payload * size
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
    """Build the actions; a segment between two of them belongs to the earlier one."""
    runs: list[ActionRun] = []
    head = 0
    ops = [one.op for one in found if one.op != BETWEEN]
    if stages is not None and [op for op, _ in stages] != ops:
        raise PlanError(
            f"the schedule executed {' '.join(ops)} instead of its plan "
            f"{' '.join(op for op, _ in stages)}"
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
