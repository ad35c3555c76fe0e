"""Predictions and bounds of changed jobs, from runs that they share.

predictor = Predictor(job, args, cluster)
predictor.estimate(change).seconds, predictor.price(change).peak_bytes
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from mindspeed.errors import MindSpeedError, PlanError
from mindspeed.flags import changed
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.compose.job import Tracer, shape_of_layout
from mindspeed.planner.count.cache import RunCache
from mindspeed.planner.explain.changes import Change
from mindspeed.planner.job import Job
from mindspeed.planner.search.bounds import Bound
from mindspeed.planner.search.evaluator import JobEvaluator
from mindspeed.planner.shape import Shape
from mindspeed.planner.time.prediction import Prediction
from mindspeed.planner.time.price import predict


class Predictor:
    """Predicts changed jobs; jobs with the same layers share recordings.

    Args:
        args: final values of the job before changes.
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
        self._job, self._args, self._cluster = job, args, cluster
        self._jobs, self._cache = jobs, cache
        self._runs: dict[tuple[str, ...], RunCache] = {}
        self._shapes: dict[str, Shape | Exception] = {}
        self._evaluators: dict[str, JobEvaluator] = {}

    def runs(self, job: Job) -> RunCache:
        """The cache of recordings of a job."""
        if job.argv not in self._runs:
            self._runs[job.argv] = RunCache(self._cache, job, self._cluster)
        return self._runs[job.argv]

    def prepare(self, found: Sequence[Change]) -> None:
        """Dry-run changed jobs, so that those that cannot start cost nothing later."""
        asked = [(self._job.changed(one.flags), one.layout) for one in found]
        shapes = isolated.map(shape_of_layout, asked, self._jobs)
        self._shapes |= zip(map(_name, found), shapes, strict=True)

    def bound(self, change: Change) -> Bound:
        """Lower bounds on memory and time; what overlaps is not known."""
        return self._evaluator(change).bound(change.layout)

    def refine(self, change: Change) -> None:
        """Tighten the bound of a change by runs of its layers."""
        if not change.flags:
            with contextlib.suppress(MindSpeedError):  # the error is reported when it is priced
                while self._evaluator(change).refine(change.layout):
                    pass

    def _evaluator(self, change: Change) -> JobEvaluator:
        text = repr(sorted(change.flags.items()))
        if text not in self._evaluators:
            args = changed(self._args, **change.flags)
            runs = self.runs(self._job)
            self._evaluators[text] = JobEvaluator(self._job, args, self._cluster, runs, self._jobs)
        return self._evaluators[text]

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
        traces = self._tracer(self._job.changed(change.flags)).exact(change.layout, shape)
        return predict(traces, shape, self._cluster, change.layout)

    def _tracer(self, job: Job) -> Tracer:
        return Tracer(job, self._cluster, self._jobs, self.runs(job))

    def _shape(self, change: Change) -> Shape:
        shape = self._shapes[_name(change)]
        if isinstance(shape, Exception):
            raise shape
        if shape.unspliceable:
            raise PlanError(f"{shape.unspliceable}: count it with --check --whole")
        return shape


def _name(change: Change) -> str:
    return repr((change.layout, sorted(change.flags.items())))
