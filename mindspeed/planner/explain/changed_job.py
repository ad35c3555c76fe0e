"""Predictions and bounds of changed jobs, from runs that they share.

predictor = Predictor(job, args, cluster)
predictor.estimate(change).seconds, predictor.price(change).peak_bytes
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path

from mindspeed.errors import MindSpeedError, PlanError
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.compose.job import Tracer, shape_of_layout
from mindspeed.planner.count.cache import RunCache
from mindspeed.planner.explain.changes import Change
from mindspeed.planner.job import Job, Overrides
from mindspeed.planner.layout import Layout
from mindspeed.planner.search.bounds import Bound
from mindspeed.planner.search.evaluator import JobEvaluator
from mindspeed.planner.shape import Shape
from mindspeed.planner.time.prediction import Prediction
from mindspeed.planner.time.price import predict


class Predictor:
    """Predicts changed jobs; jobs with the same layers share recordings.

    Args:
        job: the job before changes.
        args: its final values.
        cluster: rates of devices and links.
        jobs: processes that count.
        cache: directory of recordings; None: they are kept in memory only.
    """

    def __init__(
        self,
        job: Job,
        args: argparse.Namespace,
        cluster: Cluster,
        jobs: int = 1,
        cache: str | Path | None = None,
    ) -> None:
        self._job, self._cluster, self._jobs, self._cache = job, cluster, jobs, cache
        self.args = args
        self._runs: dict[tuple[str, ...], RunCache] = {}
        self._shapes: dict[Layout, dict[str, Shape | Exception]] = {}

    def runs(self, job: Job) -> RunCache:
        """The cache of recordings of a job."""
        if job.argv not in self._runs:
            self._runs[job.argv] = RunCache(self._cache, job, self._cluster)
        return self._runs[job.argv]

    def bounds(self, flags: Overrides) -> JobEvaluator:
        """Build bounds of the job's layouts with other values of some flags."""
        args = argparse.Namespace(**{**vars(self.args), **flags})
        runs = self.runs(self._job)
        return JobEvaluator(self._job, args, self._cluster, runs, self._jobs)

    def prepare(self, found: Sequence[Change]) -> None:
        """Dry-run changed jobs, so that those that cannot start cost nothing later."""
        asked = [(changed_job(self._job, one.flags), one.layout) for one in found]
        for one, shape in zip(found, isolated.map(shape_of_layout, asked, self._jobs), strict=True):
            self._shapes.setdefault(one.layout, {})[_text(one.flags)] = shape

    def estimate(self, change: Change) -> Prediction:
        """Predict from recordings that changed jobs share.

        Flags besides the layout only change what hides messages of data-parallel groups, which
        actions do not contain: the recordings are those of the unchanged job.

        Raises:
            MindSpeedError: the changed job cannot start, or cannot be counted.
        """
        shape = self._shape(change)
        traces = self._tracer(self._job).alike(change.layout, shape)
        return predict(traces, shape, self._cluster, change.layout)

    def price(self, change: Change) -> Prediction:
        """Predict from recordings of the changed job.

        Raises:
            MindSpeedError: the changed job cannot start, or cannot be counted.
        """
        shape = self._shape(change)
        traces = self._tracer(changed_job(self._job, change.flags)).exact(change.layout, shape)
        return predict(traces, shape, self._cluster, change.layout)

    def _tracer(self, job: Job) -> Tracer:
        return Tracer(job, self._cluster, self._jobs, self.runs(job))

    def _shape(self, change: Change) -> Shape:
        layout = change.layout
        shape = self._shapes.get(layout, {}).get(_text(change.flags))
        if shape is None:
            shape = isolated.call(shape_of_layout, changed_job(self._job, change.flags), layout)
        if isinstance(shape, Exception):
            raise shape
        if shape.unspliceable:
            raise PlanError(f"{shape.unspliceable}: count it with --check --whole")
        return shape


class ChangeBounds:
    """Lower bounds on memory and time of changed jobs.

    Args:
        predictor: predictor of the job.
        now: prediction of the unchanged job.
    """

    def __init__(self, predictor: Predictor, now: Prediction) -> None:
        self._predictor, self._now = predictor, now
        self._evaluators: dict[str, JobEvaluator] = {}

    def __call__(self, change: Change) -> Bound:
        """Bound a change; overlaps hide at most the waits for other replicas."""
        found = self._of(change).bound(change.layout)
        if not change.flags:
            return found
        rest = self._now.seconds - self._now.exposed.get("data parallel", 0.0)
        return Bound(max(found.seconds, rest), found.nbytes)

    def refine(self, change: Change) -> None:
        """Tighten the bound of a change by runs of its layers."""
        if not change.flags:
            with contextlib.suppress(MindSpeedError):  # the error is reported when it is priced
                while self._of(change).refine(change.layout):
                    pass

    def _of(self, change: Change) -> JobEvaluator:
        text = _text(change.flags)
        if text not in self._evaluators:
            self._evaluators[text] = self._predictor.bounds(change.flags)
        return self._evaluators[text]


def changed_job(job: Job, flags: Overrides) -> Job:
    """Copy a job with other values of some flags, by argument name."""
    if not flags:
        return job
    words = tuple(job.flags(flags))
    changed = copy.copy(job)
    object.__setattr__(changed, "argv", words)
    object.__setattr__(changed, "_words", words)
    return changed


def _text(flags: Overrides) -> str:
    return repr(sorted(flags.items()))
