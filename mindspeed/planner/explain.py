"""Where a job's bytes, FLOPs, messages and seconds are, and which changes would help most.

found = explain(job, cluster, jobs=2)
found.check.ranks            # bytes, FLOPs and messages of pipeline ranks
found.parts[0]               # the same of the layers of pipeline rank 0
found.prediction.bubble      # and where the time goes
found.helpful                # changes, each with the figures that are predicted for it
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mindspeed.planner import isolated
from mindspeed.planner.changes import Change, Effect, changes, effects, most_helpful
from mindspeed.planner.check import Check, check
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.composed import compose
from mindspeed.planner.job import Job, Overrides
from mindspeed.planner.layout import Layout, layout_of
from mindspeed.planner.parts import Part, parts
from mindspeed.planner.price import Prediction, predict
from mindspeed.planner.shape import Shape, shape_of
from mindspeed.planner.signature import Signature, measure
from mindspeed.training.fake_job import rank_in_stage
from mindspeed.training.resolve import Settings

Progress = Callable[[str, int, int], None]
"""Told what is done, how much of it, and how much there is."""


@dataclass(frozen=True)
class Explanation:
    """One job.

    Attributes:
        check: bytes, FLOPs and messages of all pipeline ranks.
        parts: of some pipeline ranks their layers and the rest, for one micro-batch.
        prediction: where the time goes; None for a job that can only be counted whole.
        helpful: the changes that help most.
        tried: changes that were predicted or refused.
    """

    check: Check
    parts: Mapping[int, tuple[Part, ...]]
    prediction: Prediction | None
    helpful: tuple[Effect, ...] = ()
    tried: tuple[Effect, ...] = ()


def explain(
    job: Job,
    args: argparse.Namespace,
    cluster: Cluster,
    memory_limit: int,
    *,
    jobs: int = 1,
    progress: Progress = lambda what, done, of: None,
) -> Explanation:
    """Count a job, predict its time, and that of changed jobs.

    Args:
        job: the job.
        args: its final values; their features are attached.
        cluster: rates of devices and links.
        memory_limit: bytes that the tensors of a rank may take.
        jobs: processes that count.
        progress: is told how far it is.

    Raises:
        MindSpeedError: the job cannot be counted; says what is in the way.
    """
    progress("counting", 0, 1)
    composed = compose(job, args, cluster, memory_limit, jobs)
    pieces = _parts(args, cluster, jobs)
    if composed is None or composed.prediction is None:
        return Explanation(check(args, memory_limit, jobs=jobs), pieces, None)
    layout, now = layout_of(args), composed.prediction
    tried = effects(
        list(changes(layout, args)),
        Predictor(job, cluster, jobs),
        lambda done, of: progress("predicting changes", done, of),
    )
    helpful = most_helpful(tried, now, memory_limit)
    return Explanation(composed.check, pieces, now, tuple(helpful), tuple(tried))


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
    """

    def __init__(self, job: Job, cluster: Cluster, jobs: int = 1) -> None:
        self._job, self._cluster, self._jobs = job, cluster, jobs
        self._signatures: dict[object, Signature] = {}

    def __call__(self, change: Change) -> Prediction:
        """The price of the changed job.

        Raises:
            MindSpeedError: it cannot start, or cannot be counted.
        """
        job: Job = ChangedJob(self._job, change.flags) if change.flags else self._job
        layout = change.layout
        shape: Shape = isolated.call(_shape, job, layout)
        key = (
            layout.signature(),
            (layout.pp > 1, layout.vpp > 1, layout.schedule),
            shape.kinds,
            tuple(sorted(change.flags.items())),
        )
        if key not in self._signatures:
            self._signatures[key] = measure(job, layout, self._cluster, self._jobs)
        return predict(self._signatures[key], shape, self._cluster, layout)


class ChangedJob(Job):
    """A job with other values of some flags.

    Args:
        job: the job.
        flags: values by their names in the namespace.
    """

    def __init__(self, job: Job, flags: Overrides) -> None:
        for name, value in vars(job).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_job", job)
        object.__setattr__(self, "_flags", dict(flags))

    def settings(self, overrides: Overrides | None = None, devices: int | None = None) -> Settings:
        """Final values of the changed job."""
        job: Job = vars(self)["_job"]
        return job.settings({**vars(self)["_flags"], **(overrides or {})}, devices)


def _shape(job: Job, layout: Layout) -> Shape:
    return shape_of(job.settings(layout.overrides(), layout.devices).args)
