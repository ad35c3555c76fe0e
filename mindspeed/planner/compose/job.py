"""Trace every rank of a job from recordings of small ones.

traces = trace_job(job, layout, shape, cluster, jobs=2)
traces[0].peak, traces[0].step.flops
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from mindspeed.errors import MindSpeedError
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.compose.covering import Cover, covering, is_plain
from mindspeed.planner.compose.rank import RankTrace, trace, with_replicas
from mindspeed.planner.compose.templates import NotSpliceable
from mindspeed.planner.count.recorder import record
from mindspeed.planner.count.recording import Point, Recording
from mindspeed.planner.job import Job
from mindspeed.planner.layout import Layout
from mindspeed.planner.shape import EXPERT, Shape

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
        points = [one for cover in covers for one in _points(cover)]
        of = _recorded(job, [*points, *filter(None, built)], cluster, jobs, cache)
        return [
            trace(cover, of, None if own is None else of(own))
            for cover, own in zip(covers, built, strict=True)
        ]

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
        points = [one for cover in covers for one in _points(cover)]
        shared = shape.distributed_optimizer
        more = [_twice(one) for cover in covers for one in cover.points[1:] if shared]
        of = _recorded(job, [*points, *more], cluster, jobs, cache)

        def replicated(cover: Cover, point: Point) -> Recording:
            if not shared or point not in cover.points:
                return of(point)
            alike = point if point in cover.points[1:] else cover.base  # with the same layers
            return with_replicas(of(point), of(alike), of(_twice(alike)), times)

        return [trace(one, partial(replicated, one)) for one in covers]

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
    """Trace with as many neighbours of a layer as matter, and real layers where bare ones differ.

    Raises:
        NotSpliceable: no trace fits.
    """
    kinds = [True, False] if EXPERT not in shape.layer_kinds else [False]
    if is_plain(layout, shape):
        kinds = [False]
    ways = [(reach, bare) for bare in kinds for reach in range(1, LARGEST_REACH + 1)]
    for reach, bare in ways:
        try:
            return traced(covering(layout, shape, ranks, reach, bare))
        except NotSpliceable:  # such as transfers that end two layers later
            if (reach, bare) == ways[-1]:
                raise
    raise AssertionError("unreachable")


def _points(cover: Cover) -> list[Point]:
    """All ranks to record, those that show what bare layers leave out included."""
    found = cover.points
    for one in cover.distinct_sources:
        found += [*_points(one), replace(one.point, bare=True)]
    return found


def _built(layout: Layout, shape: Shape, ranks: Sequence[int]) -> list[Point | None]:
    """Ranks without a forward, if their buffers are padded for sharing; equal ranks once."""
    if not shape.distributed_optimizer:
        return [None for _ in ranks]
    names = [tuple((role, word) for role, word in shape.chunks_of(rank)) for rank in ranks]
    first = [ranks[names.index(name)] for name in names]
    return [Point(layout.overrides(), layout.devices, one, forward=False) for one in first]


def _recorded(
    job: Job,
    asked: Sequence[Point],
    cluster: Cluster | None,
    jobs: int,
    cache: Recordings | None,
) -> Callable[[Point], Recording]:
    """Make the recordings that the cache lacks; equal points once."""
    points: list[Point] = []
    for one in asked:
        if one not in points:
            points.append(one)
    known = [None if cache is None else cache.get(point) for point in points]
    missing = [index for index, one in enumerate(known) if one is None]
    arguments = [(job, points[index], cluster) for index in missing]
    results = isolated.map(record, arguments, jobs, RUN_SECONDS)
    for index, result in zip(missing, results, strict=True):
        if isinstance(result, MindSpeedError):
            raise result
        known[index] = result
        if cache is not None:
            cache.put(points[index], result)

    def recording_of(point: Point) -> Recording:
        found = known[points.index(point)]
        assert found is not None
        return found

    return recording_of
