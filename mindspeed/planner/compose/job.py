"""Trace every rank of a job from recordings of small ones.

traces = trace_job(job, layout, shape, cluster, jobs=2)
traces[0].peak, traces[0].step.flops
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from mindspeed.errors import MindSpeedError
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.compose.covering import covering
from mindspeed.planner.compose.rank import RankTrace, trace
from mindspeed.planner.compose.templates import NotSpliceable
from mindspeed.planner.count.recorder import between_steps, record
from mindspeed.planner.count.recording import Point, Recording, Static
from mindspeed.planner.job import Job
from mindspeed.planner.layout import Layout
from mindspeed.planner.shape import Shape

LARGEST_REACH = 2
"""Most neighbours of a layer on either side that may matter."""
RUN_SECONDS = 300.0
"""Timeout of a recording."""


class Recordings(Protocol):
    """A cache."""

    def get(self, point: Point) -> Recording | None:
        """The recording of a point; None if there is none."""

    def put(self, point: Point, recording: Recording) -> None:
        """Store a recording."""


def trace_job(
    job: Job,
    layout: Layout,
    shape: Shape,
    cluster: Cluster | None = None,
    jobs: int = 1,
    cache: Recordings | None = None,
    ranks: Sequence[int] | None = None,
) -> list[RankTrace]:
    """Trace ranks of a job.

    Args:
        job: the job.
        layout: its layout.
        shape: its shape in this layout.
        cluster: rates of the clock; None: no times.
        jobs: concurrent recordings.
        cache: cache of recordings.
        ranks: pipeline ranks; default: all.

    Raises:
        MindSpeedError: the job cannot start, or cannot be counted.
        NotSpliceable: it can only be counted whole.
    """
    asked = list(range(shape.ranks) if ranks is None else ranks)
    built = _built(job, layout, shape, asked, jobs)
    for reach in range(1, LARGEST_REACH + 1):
        covers = covering(layout, shape, asked, reach)
        points = [[one.point, one.base, *(x.point for x in one.longer)] for one in covers]
        all_points = [one for of_rank in points for one in of_rank]
        found = iter(_recorded(job, all_points, cluster, jobs, cache))
        recordings = [[next(found) for _ in of_rank] for of_rank in points]
        try:
            return [trace(*one) for one in zip(covers, recordings, built, strict=True)]
        except NotSpliceable:  # such as transfers that end two layers later
            if reach == LARGEST_REACH:
                raise
    raise AssertionError("unreachable")


def _built(
    job: Job, layout: Layout, shape: Shape, ranks: Sequence[int], jobs: int
) -> list[Static | None]:
    """What ranks have between steps, if buffers are padded for sharing; equal ranks once."""
    if not shape.distributed_optimizer:
        return [None] * len(ranks)
    names = [tuple((role, word) for role, word in shape.chunks_of(rank)) for rank in ranks]
    first = [names.index(name) for name in names]
    chosen = sorted(set(first))
    asked = [(job, layout.overrides(), layout.devices, ranks[index]) for index in chosen]
    found: dict[int, Static] = {}
    for index, one in zip(
        chosen, isolated.map(between_steps, asked, jobs, RUN_SECONDS), strict=True
    ):
        if isinstance(one, Exception):
            raise one
        found[index] = one
    return [found[index] for index in first]


def _recorded(
    job: Job,
    points: Sequence[Point],
    cluster: Cluster | None,
    jobs: int,
    cache: Recordings | None,
) -> Iterable[Recording]:
    """Make the recordings that the cache lacks; equal points once."""
    known: dict[int, Recording] = {}
    first = [points.index(point) for point in points]
    for index in sorted(set(first)):
        if cache is not None and (one := cache.get(points[index])) is not None:
            known[index] = one
    missing = [index for index in sorted(set(first)) if index not in known]
    arguments = [(job, points[index], cluster) for index in missing]
    results = isolated.map(record, arguments, jobs, RUN_SECONDS)
    for index, result in zip(missing, results, strict=True):
        if isinstance(result, MindSpeedError):
            raise result
        known[index] = result
        if cache is not None:
            cache.put(points[index], result)
    return [known[index] for index in first]
