"""Predictions and bounds of changed jobs, from runs that they share.

predictor = Predictor(job, args, cluster, memory_limit)
predictor.estimate(change).seconds, predictor.price(change).peak_bytes
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
from collections.abc import Sequence
from pathlib import Path

from mindspeed.errors import MindSpeedError, PlanError
from mindspeed.planner import isolated
from mindspeed.planner.changes import Change
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.composed.figures import Figure, Quantity
from mindspeed.planner.composed.measurement import RUN_SECONDS, measure, shape_of_layout
from mindspeed.planner.composed.pieces import figures_of
from mindspeed.planner.composed.price import Prediction, predict
from mindspeed.planner.composed.run_cache import RunCache
from mindspeed.planner.composed.signature import LARGEST_ERROR, TOLERANCE, Signature
from mindspeed.planner.composed.signature_points import SignaturePoints
from mindspeed.planner.composed.tiny_run import Point, TinyRun, run
from mindspeed.planner.job import Job, Overrides
from mindspeed.planner.layout import Layout
from mindspeed.planner.search.bounds import Bound
from mindspeed.planner.search.evaluator import JobEvaluator
from mindspeed.planner.shape import DENSE, Shape, shape_of


class Predictor:
    """Predicts changed jobs; jobs with the same layers are measured once.

    Args:
        job: the job before changes.
        args: its final values.
        cluster: rates of devices and links.
        memory_limit: bytes of a rank.
        jobs: processes that count.
        cache: directory of tiny runs; None: they are kept in memory only.
    """

    def __init__(
        self,
        job: Job,
        args: argparse.Namespace,
        cluster: Cluster,
        memory_limit: float,
        jobs: int = 1,
        cache: str | Path | None = None,
    ) -> None:
        self._job, self._cluster, self._jobs, self._cache = job, cluster, jobs, cache
        self.args, self._limit = args, memory_limit
        self._runs: dict[tuple[str, ...], RunCache] = {}
        self._shapes: dict[Layout, dict[str, Shape | Exception]] = {}
        self._signatures: dict[object, Signature] = {}

    def runs(self, job: Job) -> RunCache:
        """The cache of tiny runs of a job."""
        if job.argv not in self._runs:
            self._runs[job.argv] = RunCache(self._cache, job, self._cluster)
        return self._runs[job.argv]

    def bounds(self, flags: Overrides) -> JobEvaluator:
        """Build bounds of the job's layouts with other values of some flags."""
        args = argparse.Namespace(**{**vars(self.args), **flags})
        runs = self.runs(self._job)
        return JobEvaluator(self._job, args, self._cluster, runs, self._jobs, self._limit)

    def prepare(self, found: Sequence[Change]) -> None:
        """Dry-run changed jobs, so that those that cannot start cost nothing later."""
        asked = [(changed_job(self._job, one.flags), one.layout) for one in found]
        for one, shape in zip(found, isolated.map(shape_of_layout, asked, self._jobs), strict=True):
            self._shapes.setdefault(one.layout, {})[_text(one.flags)] = shape

    def estimate(self, change: Change) -> Prediction:
        """Predict from runs of ranks with one chunk, without comparing them.

        Flags besides the layout only change what hides messages of data-parallel groups, which runs
        do not contain: the runs are those of the unchanged job.

        Raises:
            MindSpeedError: the changed job cannot start, or cannot be counted.
        """
        return self._price(change, self._job, exact=False)

    def price(self, change: Change) -> Prediction:
        """Predict from the runs of the changed job.

        Raises:
            MindSpeedError: the changed job cannot start, or cannot be counted.
        """
        job = changed_job(self._job, change.flags)
        if change.flags and self._same_runs(change, job):
            job = self._job
        return self._price(change, job, exact=True)

    def _same_runs(self, change: Change, job: Job) -> bool:
        """Whether flags change no bytes and no times of a run before the end of the step.

        The end of the step must be negligible: overlaps also hide a part of the optimizer.
        """
        found = self.estimate(change)
        if found.optimizer_seconds > TOLERANCE * found.seconds:
            return False
        kinds = shape_of(self.args).kinds or (DENSE,)
        point = SignaturePoints(change.layout, kinds).point(0, kinds[0], 1)
        one, other = self._run(self._job, point), self._run(job, point)
        return _bytes_of(one) == _bytes_of(other) and _same_times(one, other)

    def _run(self, job: Job, point: Point) -> TinyRun:
        known = self.runs(job).get(point)
        if known is None:
            known = isolated.call(run, job, point, self._cluster, timeout=RUN_SECONDS)
            self.runs(job).put(point, known)
        return known

    def _price(self, change: Change, job: Job, exact: bool) -> Prediction:
        layout = change.layout
        shape = self._shapes.get(layout, {}).get(_text(change.flags))
        if shape is None:
            shape = isolated.call(shape_of_layout, changed_job(self._job, change.flags), layout)
        if isinstance(shape, Exception):
            raise shape
        piped = (layout.pp > 1, layout.several_chunks and exact, layout.schedule)
        key = (exact, layout.signature(), piped, shape.kinds, job.argv)
        if key not in self._signatures:
            runs = self.runs(job)
            self._signatures[key] = measure(
                job, layout, self._cluster, self._jobs, runs, check=exact, chunks=exact
            )
        signature = self._signatures[key]
        found = predict(signature, shape, self._cluster, layout)
        if exact and signature.error_at(found.peak_bytes) > LARGEST_ERROR:
            raise PlanError("its composition is not exact enough; count it with --check --whole")
        return found


def _bytes_of(found: TinyRun) -> object:
    actions = [(one.op, one.level, one.peak, one.dropped) for one in found.actions]
    return found.static, found.tail, actions


def _same_times(one: TinyRun, other: TinyRun) -> bool:
    """Compare the median times of actions; single ones may wait for other replicas."""
    times = [{n: v for n, v in figures_of(run).items() if n in _TIMES} for run in (one, other)]
    return times[0].keys() == times[1].keys() and all(
        math.isclose(value, times[1][name], rel_tol=TOLERANCE) for name, value in times[0].items()
    )


_TIMES = tuple(Figure(Quantity.SECONDS, op) for op in "FBIW")


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
                self._of(change).refine(change.layout)

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
