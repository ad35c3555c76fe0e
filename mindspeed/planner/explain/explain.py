"""Explain a job: its bytes, FLOPs, messages and seconds, and the changes that help most.

found = explain(job, args, cluster, memory_limit, jobs=2)
found.check.ranks            # bytes, FLOPs and messages of pipeline ranks
found.parts[0]               # the same, of the layers of pipeline rank 0
found.prediction.bubble      # breakdown of the time
found.helpful                # changes with their predicted figures
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mindspeed.errors import MindSpeedError
from mindspeed.job import Parallel
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.compose.compose import compose, count_whole
from mindspeed.planner.count.check import Check
from mindspeed.planner.count.parts import PartFigures, parts
from mindspeed.planner.explain.changes import changes
from mindspeed.planner.explain.effects import INTERRUPTED, Effect, effects, most_helpful, nearest
from mindspeed.planner.explain.predictor import Predictor
from mindspeed.planner.job import Job
from mindspeed.planner.layout import layout_of
from mindspeed.planner.shape import shape_of
from mindspeed.planner.time.prediction import Prediction
from mindspeed.training.fake_job import rank_in_stage

Progress = Callable[[str, int, int], None]
"""Progress callback: the activity, how many parts are done, and the total."""
Parts = Mapping[int, tuple[PartFigures, ...]]
"""Parts by pipeline rank."""
_Run = tuple[argparse.Namespace, Cluster, int, tuple[int, ...]]
"""Arguments of :func:`mindspeed.planner.count.parts.parts`."""


@dataclass(frozen=True)
class Explanation:
    """Figures of a job and the changes that help most.

    Attributes:
        check: bytes, FLOPs and messages of all pipeline ranks.
        parts: layers, and the rest, of some pipeline ranks.
        prediction: predicted time; None for a job that can only be counted whole.
        nearest: the change that needs least memory, if none makes the job fit.
        tried: changes that were predicted, skipped or refused.
    """

    check: Check
    parts: Parts
    prediction: Prediction | None
    helpful: tuple[Effect, ...] = ()
    nearest: Effect | None = None
    tried: tuple[Effect, ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it before all changes were predicted."""
        return any(one.skipped == INTERRUPTED for one in self.tried)


def explain(
    job: Job,
    args: argparse.Namespace,
    cluster: Cluster,
    memory_limit: int,
    *,
    jobs: int = 1,
    cache: str | Path | None = None,
    progress: Progress = lambda what, done, of: None,
) -> Explanation:
    """Count a job, and predict its time and that of changed jobs.

    Args:
        args: its final values; their features are attached.
        cache: directory of recordings, which later calls reuse.

    Raises:
        MindSpeedError: the job cannot be counted; says what is in the way.
    """
    progress("counting the job", 0, 2)
    predictor = Predictor(job, args, cluster, jobs, cache)
    composed = compose(job, args, cluster, memory_limit, jobs, predictor.runs(job))
    counted = composed or count_whole(args, cluster, memory_limit, jobs)
    progress("counting layers", 1, 2)
    now = counted.prediction
    if composed is None or now is None:
        return Explanation(counted.check, _parts(_whole(args, cluster), jobs), now)
    pieces = _parts(_shorter(job, args, cluster), jobs)
    found = list(changes(layout_of(args), args))
    progress("checking which changes can start", 0, len(found))
    predictor.prepare(found)
    tried = effects(found, predictor, now, memory_limit, partial(progress, "predicting changes"))
    helpful = tuple(most_helpful(tried, now, memory_limit))
    fits = now.peak_bytes <= memory_limit or helpful
    close = None if fits else nearest(tried, now)
    return Explanation(counted.check, pieces, now, helpful, close, tuple(tried))


def _parts(ranks: Mapping[int, _Run], jobs: int) -> Parts:
    """Count the parts of pipeline ranks in ``jobs`` processes."""
    return dict(zip(ranks, isolated.each(parts, ranks.values(), jobs), strict=True))


def _whole(args: argparse.Namespace, cluster: Cluster) -> dict[int, _Run]:
    """The first, the second and the last pipeline rank."""
    last = Parallel.of(args).pipeline - 1
    return {
        stage: (args, cluster.at(rank_in_stage(args, stage)), rank_in_stage(args, stage), ())
        for stage in sorted({0, min(1, last), last})
    }


_SHORT = 3
"""Pipeline ranks of a shorter job: a first, a last and one between them."""


def _shorter(job: Job, args: argparse.Namespace, cluster: Cluster) -> dict[int, _Run]:
    """Ranks of a job with three pipeline ranks, whose layers and messages are the same.

    Ranks with several chunks run as many micro-batches as there are pipeline ranks, so that a
    shorter pipeline costs less. Only waits outside of layers may differ by some microseconds: at
    the edges of the schedule, and for collectives of all ranks. Where more would differ, the ranks
    are those of the job: stages have different layers, or messages go over different links.
    """
    layout, shape = layout_of(args), shape_of(args)
    if (
        len(cluster.kinds) > 1
        or layout.pp <= _SHORT
        or not layout.several_chunks
        or len(set(shape.stages)) > 1
    ):
        return _whole(args, cluster)
    stage = layout.devices // layout.pp
    pairs = [(0, rank * stage) for rank in (1, _SHORT - 1, layout.pp - 1)]
    if len({cluster.collective_seconds("send", 2**20, pair) for pair in pairs}) > 1:
        return _whole(args, cluster)
    small = replace(layout, pp=_SHORT, devices=stage * _SHORT, stage_layers=None)
    layers = len(shape.stages[0])
    flags = {"num_layers": layers * _SHORT * shape.chunks, "noop_layers": None}
    try:
        short = job.settings(small.overrides() | flags, small.devices).args
    except MindSpeedError:
        return _whole(args, cluster)
    there = shape_of(short).placement.stages
    found = {}
    for number, rank in enumerate((0, 1, layout.pp - 1)):
        both = zip(shape.placement.stages[rank], there[number], strict=True)
        offsets = tuple((own - other) * layers for own, other in both)
        found[rank] = short, cluster, rank_in_stage(short, number), offsets
    return found
