"""Figures of a configuration of any size within seconds, composed from small counted runs.

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
from mindspeed.planner.composed.measurement import KnownRuns, measure
from mindspeed.planner.composed.price import Prediction, RankFigures, memory, messages, predict
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
_OF_THE_LAUNCH = ("rank", "recipe", "planned_loop")


@functools.cache
def _not_compared() -> frozenset[str]:
    """Arguments of the launch, and other ways to give ``virtual_pipeline_model_parallel_size`` and
    ``pipeline_model_parallel_layout``, which are compared."""
    layers = flags_planned_as("divides layers")
    return frozenset((*_OF_THE_LAUNCH, *_CHUNKS, *layers, *not_planned()))


@dataclass(frozen=True)
class Composed:
    """A composed configuration, or one that is counted whole.

    Attributes:
        check: figures of all pipeline ranks.
        error: of composed bytes, a part of them, as far as runs tell that were compared with their
            composition; 0 where all is counted.
        prediction: seconds and what they are spent on; None without a cluster, and for a job that
            cannot be composed nor timed by its whole ranks.
        untimed: why there are no times, of a job that was to be timed.
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
    runs: KnownRuns | None = None,
) -> Composed | None:
    """The figures of a job; None where it cannot be composed.

    Args:
        job: the job.
        args: its final values.
        cluster: rates of devices and links; None: no times.
        memory_limit: bytes that the tensors of a rank may take.
        jobs: runs at a time.
        runs: those made before, and where new ones are kept.

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
    """The figures of a job that was composed, or of one that could not be.

    Ranks are counted whole in the latter case, and where composed bytes are so near to the limit
    that they could be on the wrong side of it.

    Args:
        composed: what :func:`compose` returned.
        args: final values of the job.
        cluster: rates of devices and links; None: no times.
        memory_limit: bytes that the tensors of a rank may take.
        jobs: processes that count.
        progress: callback with how many pipeline ranks are counted, and then how many are timed.

    Raises:
        MindSpeedError: the job cannot be counted; says what is in the way.
    """
    if composed is not None and not _near(composed, memory_limit):
        return composed
    counted = check(args, memory_limit, jobs=jobs, progress=progress)
    if composed is not None:
        return Composed(counted, 0.0, composed.prediction)
    if cluster is None:
        return Composed(counted, 0.0)
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
    """Whether the layout's flags give the same job again; changes the state of this process.

    Args:
        job: the job.
        layout: of its values.
        args: its final values.
    """
    again = job.settings(layout.overrides(), layout.devices).args
    names = vars(args).keys() | vars(again).keys()
    return not [name for name in names if not _same(vars(args), vars(again), name)]


def _same(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    if name in _not_compared() or name.startswith("_"):
        return True
    a, b = one.get(name), other.get(name)
    return bool(a == b) or (a is not None and b is not None and repr(a) == repr(b))


def ranks_of(signature: Signature, shape: Shape) -> list[RankCheck]:
    """Figures of every pipeline rank.

    Args:
        signature: of the shape's layers.
        shape: of the job.
    """
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
        round(total["parameters"]),
        static,
        round(found.peak),
        {**static, "activations": static.get("activations", 0) + round(found.activations)},
        round(total["flops"] * shape.micro_batches),
        round(total["recomputed"] * shape.micro_batches),
        tuple(_traffic(total, sent, shape)),
        round(total["host"]),
    )


def _traffic(
    total: Mapping[str, float], sent: Mapping[str, float], shape: Shape
) -> Iterator[Traffic]:
    """Messages within micro-batches and after them, and collectives of data-parallel groups."""
    replicas, experts = len(dense_ranks(shape)), len(expert_ranks(shape))
    rows = list(_messages(total, sent, shape))
    for name, value in total.items():
        kind, _, op = name.partition(" ")
        size = {"dp": replicas, "edp": experts}.get(kind, 0)
        if size > 1 and round(value):
            each = value / size if op == "all_gather" else value
            part = (size - 1) / size * value * (2 if op == "all_reduce" else 1)
            group = "DATA_PARALLEL" if kind == "dp" else "EXPERT_DATA_PARALLEL"
            rows.append(Traffic(group, size, op, None, round(each), round(part)))
    yield from sorted(rows, key=lambda row: (-row.wire, row.group, row.op))


def _messages(
    total: Mapping[str, float], sent: Mapping[str, float], shape: Shape
) -> Iterator[Traffic]:
    """Messages of all micro-batches and of the end of the step, by group and operation."""
    sums: dict[tuple[str, int, str], Counter[str]] = defaultdict(Counter)
    closing = {n.removeprefix("closing "): v for n, v in total.items() if n.startswith("closing ")}
    for figures in (sent, closing):
        for name, value in figures.items():
            what, _, rest = name.partition(" ")
            if what in ("calls", "payload", "wire"):
                group, size, op = rest.split("|")
                ranks = len(group_ranks(group, int(size), shape))
                sums[group, ranks, op][what] += round(value)
    for (group, ranks, op), found in sums.items():
        wire = found["wire"]
        if op == "all_reduce":
            wire = round(2 * (ranks - 1) / ranks * found["payload"])
        if found["payload"] and ranks > 1:
            yield Traffic(group, ranks, op, found["calls"], found["payload"], wire)
