"""Where a job's bytes, FLOPs, messages and seconds are, and which changes would help most.

found = explain(job, args, cluster, memory_limit, jobs=2)
found.check.ranks            # bytes, FLOPs and messages of pipeline ranks
found.parts[0]               # the same of the layers of pipeline rank 0
found.prediction.bubble      # and where the time goes
found.helpful                # changes, each with the figures that are predicted for it
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed.errors import PlanError
from mindspeed.planner import isolated
from mindspeed.planner.bounds import Bounds
from mindspeed.planner.changes import (
    INTERRUPTED,
    Change,
    Effect,
    changes,
    effects,
    most_helpful,
    nearest,
)
from mindspeed.planner.check import Check, check
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.composed import compose
from mindspeed.planner.job import Job, Overrides
from mindspeed.planner.layout import V_SHAPES, Layout, layout_of
from mindspeed.planner.measurement import measure
from mindspeed.planner.parts import Part, parts
from mindspeed.planner.price import Prediction, predict
from mindspeed.planner.run_cache import RunCache
from mindspeed.planner.shape import Shape, shape_of
from mindspeed.planner.signature import Signature
from mindspeed.training.fake_job import rank_in_stage

Progress = Callable[[str, int, int], None]
"""Told what is done, how much of it, and how much there is."""


@dataclass(frozen=True)
class Explanation:
    """One job.

    Attributes:
        check: bytes, FLOPs and messages of all pipeline ranks.
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
    predictor = Predictor(job, cluster, jobs, cache)
    composed = compose(job, args, cluster, memory_limit, jobs, predictor.runs(job))
    progress("counting layers", 1, 2)
    pieces = _parts(args, cluster, jobs)
    if composed is None or composed.prediction is None:
        return Explanation(check(args, memory_limit, jobs=jobs), pieces, None)
    now, found = composed.prediction, list(changes(layout_of(args), args))
    bounds = Bounds(args, cluster)
    progress("asking which changes can start", 0, len(found))
    predictor.prepare(found)
    tried = effects(
        found,
        predictor,
        now,
        memory_limit,
        bound=lambda change: bounds.of(change.layout),
        progress=lambda done, of: progress("predicting changes", done, of),
    )
    helpful = tuple(most_helpful(tried, now, memory_limit))
    fits = now.peak_bytes <= memory_limit or helpful
    return Explanation(
        composed.check, pieces, now, helpful, None if fits else nearest(tried, now), tuple(tried)
    )


def _parts(args: argparse.Namespace, cluster: Cluster, jobs: int) -> dict[int, tuple[Part, ...]]:
    """Of the first, the second and the last pipeline rank."""
    last = args.pipeline_model_parallel_size - 1
    stages = sorted({0, min(1, last), last})
    found = isolated.map(
        parts, [(args, cluster, rank_in_stage(args, stage)) for stage in stages], jobs
    )
    results = {}
    for stage, one in zip(stages, found, strict=True):
        if isinstance(one, Exception):
            raise one
        results[stage] = one
    return results


class Predictor:
    """Predicts changed jobs; jobs with the same layers are measured once.

    Args:
        job: that is changed.
        cluster: rates of devices and links.
        jobs: processes that count.
        cache: directory of tiny runs; None: they are kept in memory alone.
    """

    def __init__(
        self, job: Job, cluster: Cluster, jobs: int = 1, cache: str | Path | None = None
    ) -> None:
        self._job, self._cluster, self._jobs, self._cache = job, cluster, jobs, cache
        self._runs: dict[tuple[str, ...], RunCache] = {}
        self._shapes: dict[Layout, dict[str, Shape | Exception]] = {}
        self._signatures: dict[object, Signature] = {}

    def runs(self, job: Job) -> RunCache:
        """Tiny runs of a job."""
        if job.argv not in self._runs:
            self._runs[job.argv] = RunCache(self._cache, job, self._cluster)
        return self._runs[job.argv]

    def prepare(self, found: Sequence[Change]) -> None:
        """Start changed jobs dry, so that those that cannot start cost nothing later."""
        asked = [(changed_job(self._job, one.flags), one.layout) for one in found]
        for one, shape in zip(found, isolated.map(_shape, asked, self._jobs), strict=True):
            self._shapes.setdefault(one.layout, {})[_text(one.flags)] = shape

    def __call__(self, change: Change) -> Prediction:
        """The price of the changed job.

        Raises:
            MindSpeedError: it cannot start, or cannot be counted.
        """
        layout, job = change.layout, changed_job(self._job, change.flags)
        shape = self._shapes.get(layout, {}).get(_text(change.flags))
        if shape is None:
            shape = isolated.call(_shape, job, layout)
        if isinstance(shape, Exception):
            raise shape
        several = layout.pp > 1 and (layout.vpp > 1 or layout.schedule in V_SHAPES)
        piped = (layout.pp > 1, several, layout.schedule)
        key = (layout.signature(), piped, shape.kinds, _text(change.flags))
        if key not in self._signatures:
            runs = self.runs(job)
            self._signatures[key] = measure(job, layout, self._cluster, self._jobs, runs)
        signature = self._signatures[key]
        if not signature.fits:
            raise PlanError("its composition is not exact; count it with --check --whole")
        return predict(signature, shape, self._cluster, layout)


def changed_job(job: Job, flags: Overrides) -> Job:
    """A job with other values of some flags.

    Args:
        job: the job.
        flags: values by their names in the namespace.
    """
    if not flags:
        return job
    words = tuple(job.flags(flags))
    changed = copy.copy(job)
    object.__setattr__(changed, "argv", words)
    object.__setattr__(changed, "_words", words)
    return changed


def _text(flags: Overrides) -> str:
    return repr(sorted(flags.items()))


def _shape(job: Job, layout: Layout) -> Shape:
    return shape_of(job.settings(layout.overrides(), layout.devices).args)
