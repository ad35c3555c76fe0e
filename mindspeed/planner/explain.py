"""Where a job's bytes, FLOPs, messages and seconds are, and which changes would help most.

found = explain(job, args, cluster, memory_limit, jobs=2)
found.check.ranks            # bytes, FLOPs and messages of pipeline ranks
found.parts[0]               # the same of the layers of pipeline rank 0
found.prediction.bubble      # and where the time goes
found.helpful                # changes, each with the figures that are predicted for it
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed.errors import MindSpeedError
from mindspeed.planner import isolated
from mindspeed.planner.changed_job import ChangeBounds, Predictor
from mindspeed.planner.changes import changes
from mindspeed.planner.check import Check, check
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.composed import compose
from mindspeed.planner.effects import INTERRUPTED, Effect, effects, most_helpful, nearest
from mindspeed.planner.job import Job
from mindspeed.planner.layout import V_SHAPES, layout_of
from mindspeed.planner.parts import Part, parts
from mindspeed.planner.price import Prediction
from mindspeed.planner.search import LARGEST_ERROR
from mindspeed.planner.shape import shape_of
from mindspeed.planner.signature import TOLERANCE
from mindspeed.training.fake_job import rank_in_stage

Progress = Callable[[str, int, int], None]
"""Told what is done, how much of it, and how much there is."""


@dataclass(frozen=True)
class Explanation:
    """One job.

    Attributes:
        check: bytes, FLOPs and messages of all pipeline ranks.
        error: of composed bytes, a part of them; 0 for a job that is counted whole.
        parts: of some pipeline ranks their layers and the rest.
        prediction: where the time goes; None for a job that can only be counted whole.
        helpful: the changes that help most.
        nearest: for a job that none of them makes fit, the one that needs least memory.
        tried: changes that were predicted, skipped or refused.
    """

    check: Check
    parts: Mapping[int, tuple[Part, ...]]
    prediction: Prediction | None
    helpful: tuple[Effect, ...] = ()
    nearest: Effect | None = None
    tried: tuple[Effect, ...] = ()
    error: float = 0.0

    @property
    def interrupted(self) -> bool:
        """Whether it was ended before all changes were looked at."""
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
    """Count a job, predict its time, and that of changed jobs.

    Args:
        job: the job.
        args: its final values; their features are attached.
        cluster: rates of devices and links.
        memory_limit: bytes that the tensors of a rank may take.
        jobs: processes that count.
        cache: directory of tiny runs, so that they are made once.
        progress: is told how far it is.

    Raises:
        MindSpeedError: the job cannot be counted; says what is in the way.
    """
    progress("counting the job", 0, 2)
    predictor = Predictor(job, args, cluster, memory_limit, jobs, cache)
    runs = predictor.runs(job)
    composed = compose(job, args, cluster, memory_limit, jobs, runs, LARGEST_ERROR)
    progress("counting layers", 1, 2)
    if composed is None or composed.prediction is None:
        pieces = _parts(args, cluster, jobs)
        return Explanation(check(args, memory_limit, jobs=jobs), pieces, None)
    now, error = composed.prediction, composed.error
    pieces = _parts(args, cluster, jobs, _shorter(job, args, cluster))
    near = error > TOLERANCE and abs(now.peak_bytes / memory_limit - 1) <= error
    counted = check(args, memory_limit, jobs=jobs) if near else composed.check
    found = list(changes(layout_of(args), args))
    progress("asking which changes can start", 0, len(found))
    predictor.prepare(found)
    tried = effects(
        found,
        predictor,
        now,
        memory_limit,
        bounds=ChangeBounds(predictor, now),
        progress=lambda done, of: progress("predicting changes", done, of),
    )
    helpful = tuple(most_helpful(tried, now, memory_limit))
    fits = now.peak_bytes <= memory_limit or helpful
    close = None if fits else nearest(tried, now)
    return Explanation(counted, pieces, now, helpful, close, tuple(tried), error)


def _parts(
    args: argparse.Namespace,
    cluster: Cluster,
    jobs: int,
    shorter: argparse.Namespace | None = None,
) -> dict[int, tuple[Part, ...]]:
    """Of the first, the second and the last pipeline rank.

    Args:
        args: final values of the job.
        cluster: rates of devices and links.
        jobs: processes.
        shorter: those of a job with fewer pipeline ranks and the same parts (:func:`_shorter`).
    """
    last = args.pipeline_model_parallel_size - 1
    stages = sorted({0, min(1, last), last})
    ranks = [
        (args, rank_in_stage(args, stage))
        if shorter is None
        else (shorter, rank_in_stage(shorter, number))
        for number, stage in enumerate(stages)
    ]
    found = isolated.map(parts, [(final, cluster, rank) for final, rank in ranks], jobs)
    results = {}
    for stage, one in zip(stages, found, strict=True):
        if isinstance(one, Exception):
            raise one
        results[stage] = one
    return results


_SHORT = 3
"""Pipeline ranks: a first, a last and one between them."""


def _shorter(job: Job, args: argparse.Namespace, cluster: Cluster) -> argparse.Namespace | None:
    """The job with three pipeline ranks, whose layers and messages are those of the whole one.

    Ranks with several chunks run as many micro-batches as there are pipeline ranks, so that a
    shorter pipeline costs less. None where it would differ: where stages have different layers, or
    messages of stages go over different links.
    """
    layout, shape = layout_of(args), shape_of(args)
    several = layout.vpp > 1 or layout.schedule in V_SHAPES
    if layout.pp <= _SHORT or not several or len(set(shape.stages)) > 1:
        return None
    stage = layout.devices // layout.pp
    ranks = [(0, rank * stage) for rank in (1, _SHORT - 1, layout.pp - 1)]
    if len({cluster.collective_seconds("send", 2**20, pair) for pair in ranks}) > 1:
        return None
    short = replace(layout, pp=_SHORT, devices=stage * _SHORT, stage_layers=None)
    layers = {"num_layers": args.num_layers // layout.pp * _SHORT, "noop_layers": None}
    try:
        return job.settings(short.overrides() | layers, short.devices).args
    except MindSpeedError:
        return None
