"""Compose the figures of a configuration of any size from small recorded runs, within seconds.

    found = compose(job, settings.args, cluster, jobs=2)
    found.prediction.seconds, found.check.ranks[0].peak

A job is composed if a :class:`~mindspeed.planner.layout.Layout` describes it and the recordings of
small jobs can be spliced to it (:mod:`mindspeed.planner.compose.job`). Other jobs are counted whole
(:mod:`mindspeed.planner.count.check`).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed.errors import MindSpeedError
from mindspeed.features.registry import flags_planned_as
from mindspeed.flags import GIVEN
from mindspeed.pipeline.layout import spelt_out
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.compose.job import Tracer
from mindspeed.planner.count.cache import RunCache
from mindspeed.planner.count.check import (
    Check,
    Progress,
    check,
    counted_rank,
    group_equal_ranks,
)
from mindspeed.planner.job import Job, not_planned
from mindspeed.planner.layout import Layout, layout_of
from mindspeed.planner.shape import shape_of
from mindspeed.planner.time.prediction import Prediction
from mindspeed.planner.time.price import predict, rank_check

_CHUNKS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_LAUNCH = ("rank", "recipe", "planned_loop")


@functools.cache
def _not_compared() -> frozenset[str]:
    """Arguments of the launch, and other ways to give sizes of a layout, which are compared."""
    sizes = flags_planned_as("lays out")
    return frozenset((GIVEN, *_LAUNCH, *_CHUNKS, *sizes, *not_planned()))


@dataclass(frozen=True)
class Composed:
    """A composed configuration, or one that is counted whole.

    Attributes:
        check: figures of all pipeline ranks.
        prediction: seconds and what they are spent on; None without a cluster, and for a job that
            can neither be composed nor timed by its whole ranks.
        untimed: reason why a job that was to be timed has no times.
    """

    check: Check
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
        cluster: rates of devices and links; None: no times.

    Raises:
        MindSpeedError: the job cannot start.
    """
    layout = layout_of(args)
    if not isolated.call(describes, job, layout, args):
        return None
    shape = shape_of(args)
    if shape.unspliceable:
        return None
    try:
        traces = Tracer(job, cluster, jobs, runs).exact(layout, shape)
    except MindSpeedError:  # a small pipeline refuses what a large one may accept
        return None
    ranks = [rank_check(rank, one, shape) for rank, one in enumerate(traces)]
    equal = tuple(group_equal_ranks(ranks))
    found = Check(shape.micro_batches, equal, memory_limit, True, counted_rank(args))
    prediction = None if cluster is None else predict(traces, shape, cluster, layout)
    return Composed(found, prediction)


def count_whole(
    args: argparse.Namespace,
    cluster: Cluster | None,
    memory_limit: int | None = None,
    jobs: int = 1,
    progress: Progress = lambda done, of: None,
) -> Composed:
    """Count whole ranks of a job that cannot be composed, and time them on a cluster.

    Args:
        progress: progress callback, of counted pipeline ranks, then of timed ones.

    Raises:
        MindSpeedError: the job cannot be counted; says what is in the way.
    """
    counted = check(args, memory_limit, jobs=jobs, progress=progress)
    if cluster is None:
        return Composed(counted)
    from mindspeed.planner.time.whole_ranks import predict_whole

    try:
        return Composed(counted, predict_whole(args, counted, cluster, jobs, progress))
    except MindSpeedError as error:
        return Composed(counted, untimed=str(error).strip().splitlines()[0])


def describes(job: Job, layout: Layout, args: argparse.Namespace) -> bool:
    """Whether a job with the layout's flags has final values ``args``; changes this process."""
    try:
        again = job.settings(layout.overrides(), layout.devices).args
    except MindSpeedError:  # such as of a size that a flag multiplies once more
        return False
    names = vars(args).keys() | vars(again).keys()
    return not [name for name in names if not _same(vars(args), vars(again), name)]


def _same(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    if name in _not_compared() or name.startswith("_"):
        return True
    a, b = one.get(name), other.get(name)
    if name == "pipeline_model_parallel_layout" and a is not None and b is not None:
        return spelt_out(str(a)) == spelt_out(str(b))
    return bool(a == b) or (a is not None and b is not None and repr(a) == repr(b))
