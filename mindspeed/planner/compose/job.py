"""Trace every rank of a job from recordings of small ones.

traces = trace_job(job, layout, shape, cluster, jobs=2)
traces[0].peak, traces[0].step.flops
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from mindspeed.errors import MindSpeedError
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.compose.covering import Cover, covering
from mindspeed.planner.compose.rank import RankTrace, trace, with_replicas
from mindspeed.planner.compose.templates import NotSpliceable
from mindspeed.planner.count.recorder import record
from mindspeed.planner.count.recording import Point, Recording
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
    built = _built(layout, shape, asked)

    def traced(covers: Sequence[Cover]) -> list[RankTrace]:
        points = [_points(one) + own for one, own in zip(covers, built, strict=True)]
        found = []
        for cover, of in zip(covers, _recorded(job, points, cluster, jobs, cache), strict=True):
            count = len(_points(cover))
            found.append(trace(cover, of[:count], *of[count:]))
        return found

    return _widening(traced, layout, shape, asked)


def trace_alike(
    job: Job,
    layout: Layout,
    shape: Shape,
    cluster: Cluster | None = None,
    jobs: int = 1,
    cache: Recordings | None = None,
) -> list[RankTrace]:
    """Trace all ranks of a job from recordings of few data-parallel ranks, for a search.

    Layouts that differ in the pipeline and in the number of data-parallel ranks have recordings in
    common. What data-parallel ranks divide is interpolated, without its padding; the rest is that
    of :func:`trace_job`.

    Args:
        job: the job.
        layout: its layout.
        shape: its shape in this layout.
        cluster: rates of the clock; None: no times.
        jobs: concurrent recordings.
        cache: cache of recordings.

    Raises:
        MindSpeedError: the job cannot start, or cannot be counted.
        NotSpliceable: it can only be counted whole.
    """
    few = with_data_parallel(layout, FEW * _fewest(layout))
    times = (few.dp / layout.dp - 1) / (1 / 2 - 1)  # of the difference that twice as many make

    def traced(covers: Sequence[Cover]) -> list[RankTrace]:
        points = [_points(one) for one in covers]
        if not shape.distributed_optimizer:
            recorded = _recorded(job, points, cluster, jobs, cache)
            return [trace(*one) for one in zip(covers, recorded, strict=True)]
        more = [[_twice(one) for one in of[1:]] for of in points]
        recorded = _recorded(job, [*points, *more], cluster, jobs, cache)
        found = []
        for cover, of, others in zip(covers, recorded, recorded[len(covers) :], strict=False):
            pairs = list(zip(of[1:], others, strict=True))
            sized = [with_replicas(pair[0], *pair, times) for pair in pairs]
            # The point has the layers of the base.
            point = sized[0] if of[0] is of[1] else with_replicas(of[0], *pairs[0], times)
            found.append(trace(cover, [point, *sized]))
        return found

    return _widening(traced, few, shape, range(shape.ranks))


FEW = 2
"""Data-parallel ranks of recordings for a search, in the fewest that its layouts can have: with one
of them nothing is communicated."""


def _fewest(layout: Layout) -> int:
    """The fewest data-parallel ranks with as many experts."""
    inner = layout.tp * layout.cp
    return math.lcm(inner, layout.ep * layout.expert_tp) // inner


def with_data_parallel(layout: Layout, ranks: int) -> Layout:
    """The layout with so many data-parallel ranks and as many micro-batches."""
    return replace(
        layout,
        devices=layout.devices // layout.dp * ranks,
        global_batch_size=layout.global_batch_size // layout.dp * ranks,
    )


def _twice(point: Point) -> Point:
    """The rank without a forward, with twice as many data-parallel ranks."""
    size = 2 * point.overrides["global_batch_size"]
    overrides = {**point.overrides, "global_batch_size": size}
    return Point(overrides, 2 * point.devices, point.stage, forward=False)


def _widening(
    traced: Callable[[Sequence[Cover]], list[RankTrace]],
    layout: Layout,
    shape: Shape,
    ranks: Sequence[int],
) -> list[RankTrace]:
    """Trace with as many neighbours of a layer as matter."""
    for reach in range(1, LARGEST_REACH + 1):
        try:
            return traced(covering(layout, shape, ranks, reach))
        except NotSpliceable:  # such as transfers that end two layers later
            if reach == LARGEST_REACH:
                raise
    raise AssertionError("unreachable")


def _points(cover: Cover) -> list[Point]:
    return [cover.point, cover.base, *(one.point for one in cover.longer)]


def _built(layout: Layout, shape: Shape, ranks: Sequence[int]) -> list[list[Point]]:
    """Ranks without a forward, if their buffers are padded for sharing; equal ranks once."""
    if not shape.distributed_optimizer:
        return [[] for _ in ranks]
    names = [tuple((role, word) for role, word in shape.chunks_of(rank)) for rank in ranks]
    first = [ranks[names.index(name)] for name in names]
    return [[Point(layout.overrides(), layout.devices, one, forward=False)] for one in first]


def _recorded(
    job: Job,
    of_ranks: Sequence[Sequence[Point]],
    cluster: Cluster | None,
    jobs: int,
    cache: Recordings | None,
) -> list[list[Recording]]:
    """Make the recordings that the cache lacks; equal points once."""
    points = [one for of_rank in of_ranks for one in of_rank]
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
    found = (known[index] for index in first)
    return [[next(found) for _ in of_rank] for of_rank in of_ranks]
