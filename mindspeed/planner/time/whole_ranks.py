"""Time whole ranks of a job, without composition: seconds of a step.

    prediction = predict_whole(args, found, load_cluster("h100"), jobs=2)

Every pipeline rank runs the fewest micro-batches after which its memory and its actions repeat
(:func:`enough_micro_batches`) on the clock (:mod:`mindspeed.planner.count.timed_step`). The seconds
of its chunks are those of the actions that
:func:`mindspeed.planner.time.step_plan.step_plan` simulates for all micro-batches, plus what the
slowest rank does after its last action. Without a pipeline, the difference of steps of two and
three micro-batches is one micro-batch.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from mindspeed.errors import MindSpeedError, PlanError
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import build_plan
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.count.check import Check, Progress
from mindspeed.planner.count.timed_step import (
    EXCHANGES,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    TimedStep,
    between_chunks,
    exposed_by_group,
    time_step,
)
from mindspeed.planner.shape import Shape, shape_of
from mindspeed.planner.time.prediction import (
    Prediction,
    assembled,
    more_when_uneven,
    stage_costs,
)
from mindspeed.planner.time.step_plan import EXCHANGE, DataParallel, StageCosts, step_plan
from mindspeed.training.fake_job import rank_in_stage
from mindspeed.training.pipeline_figures import overlaps_experts


def enough_micro_batches(shape: Shape, rank: int) -> int:
    """The shortest step in which a rank has as many micro-batches in flight as in a whole one."""
    count, ranks, chunks = shape.micro_batches, shape.ranks, shape.chunks
    if ranks == 1:
        return min(count, 2)
    turn = (shape.request.group_size or ranks) if chunks > 1 else 1
    longest = min(count, turn * (4 * ranks * chunks // turn + 1))
    whole = _most_in_flight(shape, rank, longest)
    for batches in range(turn, longest, turn):
        try:
            enough = _most_in_flight(shape, rank, batches) == whole
        except MindSpeedError:
            continue  # the schedule needs more of them
        if enough:
            return min(count, batches + turn)
    return longest


def peak_micro_batches(args: argparse.Namespace) -> list[int] | None:
    """Micro-batches after which the peak repeats, by pipeline rank; None: all may matter."""
    shape = shape_of(args)
    if shape.unspliceable != shape.whole_only:  # a schedule whose micro-batches differ
        return None
    return [enough_micro_batches(shape, rank) for rank in range(shape.ranks)]


def _most_in_flight(shape: Shape, rank: int, micro_batches: int) -> int:
    """Largest number of chunks of micro-batches whose activations a rank keeps."""
    plan: Plan = build_plan(shape.request, shape.ranks, shape.chunks, micro_batches)
    held = most = 0
    for action in plan.rows[rank]:
        held += _CHANGES.get(action.op, 0)
        most = max(most, held)
    return most


_CHANGES = {"F": 1, "B": -1, "I": -1}


def predict_whole(
    args: argparse.Namespace,
    found: Check,
    cluster: Cluster,
    jobs: int = 1,
    progress: Progress = lambda done, of: None,
) -> Prediction:
    """Predict the time of a step from whole ranks.

    Args:
        args: final values of the job; its features are attached.
        found: its counted bytes and FLOPs.
        progress: progress callback, of timed steps.

    Raises:
        MindSpeedError: the job cannot be timed, or the seconds of the actions of its schedule do
            not follow from whole ranks.
    """
    from mindspeed.training.reference import runs_in_steps

    shape = shape_of(args)
    if shape.unspliceable != shape.whole_only:
        raise PlanError(shape.unspliceable)
    if runs_in_steps(args):
        raise PlanError("the reference model runs before the schedule: its pass has no time yet")
    ranks = range(shape.ranks)
    counts = [(2, 3)] if shape.ranks == 1 else [(enough_micro_batches(shape, r),) for r in ranks]
    asked = [
        (args, cluster.at(rank_in_stage(args, rank)), rank_in_stage(args, rank), count)
        for rank in ranks
        for count in counts[rank]
    ]
    figures: list[_Figures] = []
    for one in isolated.each(_figures, asked, jobs):
        figures.append(one)
        progress(len(figures), len(asked))
    if shape.ranks == 1:
        figures = [_continued(*figures)]
    seconds = [dict[str, float]()] * len(shape.stages)
    for rank, stages in enumerate(shape.placement.stages):
        for stage, known in zip(stages, figures[rank].chunks, strict=True):
            seconds[stage] = known
    costs = stage_costs(seconds, shape, cluster)
    plans = step_plan(shape, costs)
    waits = [{n: t * shape.micro_batches for n, t in one.waits.items()} for one in figures]
    if costs.exchange:
        waits = [
            still_exposed(one, hidden_seconds(rank, plans.short, shape, costs))
            for rank, one in enumerate(waits)
        ]
    flops = sum(one.flops * len(one.pipeline_ranks) for one in found.ranks) / shape.ranks
    ends = [one.end for one in figures]
    more = more_when_uneven([(one.busy, one.routed) for one in figures], shape)
    of = {rank: (one.static, one.peak) for one in found.ranks for rank in one.pipeline_ranks}
    memory = [of[rank] for rank in ranks]
    return assembled(shape, cluster, plans, memory, ends, waits, flops, more=more)


@dataclass(frozen=True)
class _Figures:
    """Seconds of a pipeline rank.

    Attributes:
        chunks: seconds of the ops of a micro-batch; recomputation is part of a backward.
        waits: waits of a micro-batch within its chunks, by process group.
        end: end of the step, with waits for data-parallel groups anywhere in it.
        step: the whole step.
        exposed: all waits of the step, by process group.
        routed: seconds of a micro-batch in products and exchanges of experts.
    """

    chunks: tuple[dict[str, float], ...]
    waits: dict[str, float]
    end: DataParallel
    step: float
    exposed: dict[str, float]
    routed: float

    @property
    def busy(self) -> float:
        """Seconds of a micro-batch."""
        times = {"F": 1, "B": 1, EXCHANGE: 4}
        return sum(n * one.get(op, 0.0) for one in self.chunks for op, n in times.items())


_SHARED = "DATA_PARALLEL"
"""Substring of the descriptions of data-parallel groups."""


def _figures(args: argparse.Namespace, cluster: Cluster, rank: int, micro_batches: int) -> _Figures:
    found = time_step(args, cluster, rank, micro_batches=micro_batches)
    waits = Counter[str]()
    closing, earlier = 0.0, 0.0  # waits for data-parallel ranks: added to the end of the step
    for one in found.intervals:
        if one.kind != "wait" or one.communication is None:
            continue
        group = one.communication.description
        if one.scope in (GRADIENTS, OPTIMIZER):
            closing += one.seconds if _SHARED in group else 0.0
        elif _SHARED in group:
            earlier += one.seconds
        elif not between_chunks(one):
            waits[group] += one.seconds / found.micro_batches  # type: ignore[assignment]
    end = found.gradient_seconds + found.optimizer_seconds
    apart = overlaps_experts(args)
    return _Figures(
        tuple(
            _of_parts(found, chunk) if apart else _whole(seconds)
            for chunk, seconds in enumerate(found.chunks)
        ),
        dict(waits),
        DataParallel(closing + earlier, end - closing),
        found.seconds,
        exposed_by_group(found.intervals),
        found.routed / found.micro_batches,
    )


def _whole(chunk: Mapping[str, float]) -> dict[str, float]:
    return {"F": chunk["forward"], "B": chunk["backward"] + chunk["recompute"]}


def _of_parts(found: TimedStep, chunk: int) -> dict[str, float]:
    """Seconds of a chunk whose layers run in parts, without their all-to-alls, and one of these.

    Rows that come a second time are waited for in the weight gradients here, where nothing else
    runs beside them; the clock of pairs knows this collective.
    """
    times = Counter[str]()
    for one in found.intervals:
        if one.scope.chunk != chunk or one.kind == "communication" or between_chunks(one):
            continue
        waits, what = one.kind == "wait", one.scope.what
        if waits and what in EXCHANGES:
            name = EXCHANGE
        elif what == WEIGHTS:
            name = "again" if waits else "W"
        else:
            name = "F" if one.phase == "forward" else "I"
        times[name] += one.seconds / found.micro_batches  # type: ignore[assignment]
    if not times["W"]:  # computed with the gradients of inputs
        times["I"] = times["W"] = times["I"] / 2  # type: ignore[assignment]
    backward = times["I"] + times["W"]
    return {op: times[op] for op in "FIW"} | {"B": backward, EXCHANGE: times[EXCHANGE] / 4}


def hidden_seconds(rank: int, plan: Plan, shape: Shape, costs: StageCosts) -> float:
    """Seconds of all-to-alls that the pairs of a rank hide in a step."""
    row, found, pairs = plan.rows[rank], 0.0, 0
    for first, second in pairwise(row):
        if first in plan.paired or (shape.ranks == 1 and first.op == "F"):
            alone = costs.seconds(plan, first) + costs.seconds(plan, second)
            found += alone - costs.pair_seconds(plan, first, second)
            pairs += 1
    more = (shape.micro_batches - plan.num_microbatches) * shape.chunks
    return found * (pairs + more) / pairs if pairs else 0.0


def still_exposed(waits: Mapping[str, float], hidden: float) -> dict[str, float]:
    """What is left of the waits for the all-to-alls of experts."""
    found = dict(waits)
    for name in found:
        if name.startswith("EXPERT_MODEL_PARALLEL"):
            found[name] = max(0.0, found[name] - hidden)
    return found


def _continued(two: _Figures, three: _Figures) -> _Figures:
    """Figures of a rank without a pipeline, from steps of two and three micro-batches."""
    more = three.step - two.step
    waits = {name: t - two.exposed.get(name, 0.0) for name, t in three.exposed.items()}
    waits = {name: t for name, t in waits.items() if t > 1e-9}
    shared = [name for name in two.exposed if _SHARED in name]
    exposed = sum(two.exposed[name] - 2 * waits.get(name, 0.0) for name in shared)
    end = DataParallel(exposed, two.step - 2 * more - exposed)
    chunks = three.chunks if EXCHANGE in three.chunks[0] else ({"F": more, "B": 0.0},)
    return _Figures(chunks, waits, end, two.step, two.exposed, two.routed)
