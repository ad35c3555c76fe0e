"""Compose the figures of a configuration of any size from small counted runs, within seconds.

    found = compose(job, settings.args, cluster, jobs=2)
    found.prediction.seconds, found.check.ranks[0].peak

:mod:`mindspeed.planner.composed.measurement` counts pipelines with one or two layers in a stage;
:mod:`mindspeed.planner.composed.price` composes memory and time of the whole job. A job is
composed if a :class:`~mindspeed.planner.layout.Layout` describes it and its compared runs agree
within :data:`~mindspeed.planner.composed.signature.LARGEST_ERROR`. Other jobs are counted whole
(:mod:`mindspeed.planner.counted.check`), and so is the memory of a job whose limit is within the
error of composition: composed bytes never decide whether a job fits.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed.errors import MindSpeedError
from mindspeed.features.registry import flags_planned_as
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster, load_cluster
from mindspeed.planner.composed.figures import END, TRAFFIC, Figure, Figures, Quantity
from mindspeed.planner.composed.measurement import measure
from mindspeed.planner.composed.price import Prediction, RankFigures, memory, messages, predict
from mindspeed.planner.composed.run_cache import RunCache
from mindspeed.planner.composed.signature import LARGEST_ERROR, TOLERANCE, Signature
from mindspeed.planner.composed.step_plan import (
    Actions,
    dense_ranks,
    expert_ranks,
    group_ranks,
    step_plan,
)
from mindspeed.planner.counted.check import (
    Check,
    Progress,
    RankCheck,
    Traffic,
    check,
    counted_rank,
    group_equal_ranks,
)
from mindspeed.planner.job import Job, not_planned
from mindspeed.planner.layout import Layout, layout_of
from mindspeed.planner.shape import Shape, shape_of

_CHUNKS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_LAUNCH = ("rank", "recipe", "planned_loop")


@functools.cache
def _not_compared() -> frozenset[str]:
    """Arguments of the launch, and other ways to give ``virtual_pipeline_model_parallel_size`` and
    ``pipeline_model_parallel_layout``, which are compared."""
    layers = flags_planned_as("divides layers")
    return frozenset((*_LAUNCH, *_CHUNKS, *layers, *not_planned()))


@dataclass(frozen=True)
class Composed:
    """A composed configuration, or one that is counted whole.

    Attributes:
        check: figures of all pipeline ranks.
        error: relative error of composed bytes, by the runs that were compared with their
            composition; 0 where all is counted.
        prediction: seconds and what they are spent on; None without a cluster, and for a job that
            can neither be composed nor timed by its whole ranks.
        untimed: reason why a job that was to be timed has no times.
    """

    check: Check
    error: float
    prediction: Prediction | None = None
    untimed: str = ""


def compose(
    job: Job,
    args: argparse.Namespace,
    cluster: Cluster | None,
    memory_limit: int | None = None,
    jobs: int = 1,
    runs: RunCache | None = None,
) -> Composed | None:
    """Compose the figures of a job; None where it cannot be composed.

    Args:
        job: the job.
        args: its final values.
        cluster: rates of devices and links; None: no times.
        memory_limit: bytes that the tensors of a rank may take.
        jobs: concurrent runs.
        runs: cache of runs.

    Raises:
        MindSpeedError: the job cannot start.
    """
    layout = layout_of(args)
    rates = cluster or load_cluster("generic")  # messages are counted by the clock
    if not isolated.call(describes, job, layout, args):
        return None
    shape = shape_of(args)
    if shape.uncomposable:
        return None
    try:
        signature = measure(job, layout, rates, jobs, runs)
    except MindSpeedError:  # a small pipeline refuses what a large one may accept
        return None
    ranks = ranks_of(signature, shape)
    equal = tuple(group_equal_ranks(ranks))
    found = Check(shape.micro_batches, equal, memory_limit, True, counted_rank(args))
    error = signature.error_at(found.fullest.peak)
    if error > LARGEST_ERROR:
        return None
    prediction = None if cluster is None else predict(signature, shape, cluster, layout)
    return Composed(found, error, prediction)


def count_where_needed(
    composed: Composed | None,
    args: argparse.Namespace,
    cluster: Cluster | None,
    memory_limit: int | None = None,
    jobs: int = 1,
    progress: Progress = lambda done, of: None,
) -> Composed:
    """Count whole ranks of a job that could not be composed, or whose composition is not enough.

    It is not where composed bytes are so near to the limit that they could be on the wrong side.

    Args:
        composed: result of :func:`compose`.
        args: final values of the job.
        cluster: rates of devices and links; None: no times.
        memory_limit: bytes that the tensors of a rank may take.
        jobs: processes that count.
        progress: progress callback, of counted pipeline ranks, then of timed ones.

    Raises:
        MindSpeedError: the job cannot be counted; says what is in the way.
    """
    if composed is not None and not _near(composed, memory_limit):
        return composed
    counted = check(args, memory_limit, jobs=jobs, progress=progress)
    if composed is not None or cluster is None:
        return Composed(counted, 0.0, composed.prediction if composed is not None else None)
    from mindspeed.planner.composed.whole_ranks import predict_whole

    try:
        return Composed(counted, 0.0, predict_whole(args, counted, cluster, jobs, progress))
    except MindSpeedError as error:
        return Composed(counted, 0.0, untimed=str(error).strip().splitlines()[0])


def _near(composed: Composed, memory_limit: int | None) -> bool:
    if memory_limit is None:
        return False
    distance = abs(composed.check.fullest.peak / memory_limit - 1)
    return distance <= max(composed.error, TOLERANCE)


def describes(job: Job, layout: Layout, args: argparse.Namespace) -> bool:
    """Whether a job with the layout's flags has final values ``args``; changes this process."""
    again = job.settings(layout.overrides(), layout.devices).args
    names = vars(args).keys() | vars(again).keys()
    return not [name for name in names if not _same(vars(args), vars(again), name)]


def _same(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    if name in _not_compared() or name.startswith("_"):
        return True
    a, b = one.get(name), other.get(name)
    return bool(a == b) or (a is not None and b is not None and repr(a) == repr(b))


def ranks_of(signature: Signature, shape: Shape) -> list[RankCheck]:
    """Compose the figures of every pipeline rank."""
    plans = step_plan(shape, Costs())
    bytes_of = memory(signature, shape, plan=plans.short)
    return [_figures(signature, shape, *one) for one in zip(bytes_of, plans.actions, strict=True)]


def _figures(signature: Signature, shape: Shape, found: RankFigures, actions: Actions) -> RankCheck:
    """Figures of one pipeline rank."""
    total = signature.rank(shape.chunks_of(found.rank), shape.data_parallel)
    sent = messages(signature, shape, found.rank, actions)
    static = {kind: round(value) for kind, value in found.static.items() if round(value)}
    return RankCheck(
        (found.rank,),
        round(total[Figure(Quantity.PARAMETERS)]),
        static,
        round(found.peak),
        {**static, "activations": static.get("activations", 0) + round(found.activations)},
        round(total[Figure(Quantity.FLOPS)] * shape.micro_batches),
        round(total[Figure(Quantity.RECOMPUTED)] * shape.micro_batches),
        tuple(_traffic(total, sent, shape)),
        round(total[Figure(Quantity.HOST)]),
    )


def _traffic(total: Figures, sent: Figures, shape: Shape) -> Iterator[Traffic]:
    """Messages within micro-batches and after them, and collectives of data-parallel groups."""
    groups = {
        Quantity.DENSE_BYTES: ("DATA_PARALLEL", len(dense_ranks(shape))),
        Quantity.EXPERT_BYTES: ("EXPERT_DATA_PARALLEL", len(expert_ranks(shape))),
    }
    rows = list(_messages(total, sent, shape))
    for name, value in total.items():
        group, size = groups.get(name.quantity, ("", 0))
        if size > 1 and round(value):
            op = name.collective
            each = value / size if op == "all_gather" else value
            part = (size - 1) / size * value * (2 if op == "all_reduce" else 1)
            rows.append(Traffic(group, size, op, None, round(each), round(part)))
    yield from sorted(rows, key=lambda row: (-row.wire, row.group, row.op))


def _messages(total: Figures, sent: Figures, shape: Shape) -> Iterator[Traffic]:
    """Messages of all micro-batches and of the end of the step, by group and operation."""
    sums: dict[tuple[str, int, str], Counter[Quantity]] = defaultdict(Counter)
    closing = {name: value for name, value in total.items() if name.op == END}
    for figures in (sent, closing):
        for name, value in figures.items():
            if name.quantity in TRAFFIC:
                ranks = len(group_ranks(name.name, name.size, shape))
                sums[name.name, ranks, name.collective][name.quantity] += round(value)
    for (group, ranks, op), found in sums.items():
        calls, payload, wire = (found[quantity] for quantity in TRAFFIC)
        if op == "all_reduce":
            wire = round(2 * (ranks - 1) / ranks * payload)
        if payload and ranks > 1:
            yield Traffic(group, ranks, op, calls, payload, wire)
