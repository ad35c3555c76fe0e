"""Trace every rank of a job from recordings of small ones.

traces = Tracer(job, cluster, jobs=2).exact(layout, shape)
traces[0].peak, traces[0].step.flops
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mindspeed.errors import PlanError
from mindspeed.planner import isolated
from mindspeed.planner.cluster import Cluster
from mindspeed.planner.compose.covering import Cover, Layers, covering, is_plain
from mindspeed.planner.compose.estimate import estimate
from mindspeed.planner.compose.rank import RankTrace, trace, with_replicas
from mindspeed.planner.compose.short_rows import is_interleaved
from mindspeed.planner.compose.templates import NotSpliceable
from mindspeed.planner.count import planned_tensors
from mindspeed.planner.count.cache import RunCache
from mindspeed.planner.count.recorder import record
from mindspeed.planner.count.recording import Point, Recording
from mindspeed.planner.job import Job
from mindspeed.planner.layout import Layout
from mindspeed.planner.shape import EXPERT, Shape, shape_of

LARGEST_REACH = 2
"""Most neighbours of a layer on either side that may matter."""
WAYS = [Layers.SHORT, Layers.IN_ROW]
"""Where layers of ranks that do not run 1F1B are recorded: the next where one does not fit."""
RUN_SECONDS = 300.0
"""Timeout of a recording."""


@dataclass(frozen=True)
class Tracer:
    """Traces pipeline ranks of a job from recordings of small ones.

    Attributes:
        job: the job.
        cluster: rates of the clock; None: no times.
        jobs: concurrent recordings.
        cache: cache of recordings.
    """

    job: Job
    cluster: Cluster | None = None
    jobs: int = 1
    cache: RunCache | None = None

    def exact(
        self, layout: Layout, shape: Shape, ranks: Sequence[int] | None = None
    ) -> list[RankTrace]:
        """Trace ranks as they are.

        Args:
            layout: layout of the job.
            shape: its shape in this layout.
            ranks: pipeline ranks; default: all.

        Raises:
            MindSpeedError: the job cannot start, or cannot be counted.
            NotSpliceable: it can only be counted whole.
        """
        asked = list(range(shape.ranks) if ranks is None else ranks)
        if self.cluster is not None and len(self.cluster.kinds) > 1:
            return self._by_kind(lambda one: one.exact(layout, shape, asked), shape, asked)
        built = _built(layout, shape, asked)

        def traced(covers: Sequence[Cover]) -> list[RankTrace]:
            points = [one for cover in covers for one in _points(cover)]
            of = self._recorded([*points, *filter(None, built)])
            return [
                trace(cover, of, None if own is None else of(own), shape.shards_gradients)
                for cover, own in zip(covers, built, strict=True)
            ]

        real = is_plain(layout, shape) or shape.request.pairs  # parts of layers are never bare
        ways = [Layers.IN_ROW] if real else WAYS
        return _widening(traced, layout, shape, asked, ways)

    def alike(self, layout: Layout, shape: Shape) -> list[RankTrace]:
        """Trace all ranks from recordings that the layouts of a job share, for a search.

        Layouts that differ in the pipeline and in the number of data-parallel ranks have recordings
        in common. What data-parallel ranks divide is interpolated, without its padding; the rest is
        exact, but for messages between the actions of ranks with several chunks
        (:mod:`mindspeed.planner.compose.estimate`). Layouts with other schedules and those that
        shard gradients have recordings of their own, and are exact.

        Args:
            layout: layout of the job.
            shape: its shape in this layout.

        Raises:
            MindSpeedError: the job cannot start, or cannot be counted.
            NotSpliceable: it can only be counted whole.
        """
        if self.cluster is not None and len(self.cluster.kinds) > 1:
            return self._by_kind(lambda one: one.alike(layout, shape), shape, range(shape.ranks))
        if not estimates(layout, shape):
            return self.exact(layout, shape)
        few = with_data_parallel(layout, FEW * _fewest(layout))
        times = (few.dp / layout.dp - 1) / (1 / 2 - 1)  # of the difference that twice as many make
        shared = shape.distributed_optimizer
        # Layers of experts keep bytes for the end of the step, and fp8 scales weights once in it.
        quantizes = self.job.gives("fp8") or "fp8" in str(layout.precision)
        grows_in_layers = quantizes or EXPERT in shape.layer_kinds

        def traced(covers: Sequence[Cover]) -> list[RankTrace]:
            if not grows_in_layers:
                covers = [one.with_bare_growth() for one in covers]
            leaves = [leaf for x in covers for leaf in x.chunks or [x]]
            points = [point for leaf in leaves for point in leaf.points]
            more = [_twice(point) for leaf in leaves for point in leaf.points[1:] if shared]
            of = self._recorded([*points, *more])
            known: list[tuple[Cover, RankTrace]] = []

            def replicated(cover: Cover, point: Point) -> Recording:
                if not shared:
                    return of(point)
                alike = point if point in cover.points[1:] else cover.base  # with the same layers
                return with_replicas(of(point), of(alike), of(_twice(alike)), times)

            def leaf_trace(leaf: Cover) -> RankTrace:
                for other, found in known:
                    if (other.point, other.whole, other.row) == (leaf.point, leaf.whole, leaf.row):
                        return found
                known.append((leaf, trace(leaf, partial(replicated, leaf))))
                return known[-1][1]

            return [estimate(x, leaf_trace) if x.chunks else leaf_trace(x) for x in covers]

        return _widening(traced, few, shape, range(shape.ranks), [Layers.ALONE])

    def _by_kind(
        self, traced: Callable[[Tracer], list[RankTrace]], shape: Shape, ranks: Sequence[int]
    ) -> list[RankTrace]:
        """Traces of pipeline ranks on several kinds of devices, each by a clock of its kind."""
        assert self.cluster is not None
        of_ranks = shape.kinds_on(self.cluster)
        kinds = [of_ranks[rank] for rank in ranks]
        caches = {kind: self.cache and self.cache.on(kind) for kind in dict.fromkeys(kinds)}
        found = {
            kind: traced(replace(self, cluster=kind, cache=cache)) for kind, cache in caches.items()
        }
        return [found[kind][index] for index, kind in enumerate(kinds)]

    def _recorded(self, asked: Sequence[Point]) -> Callable[[Point], Recording]:
        """Make the recordings that the cache lacks; equal points once."""
        points: list[Point] = []
        for one in asked:
            if one not in points:
                points.append(one)
        known = [None if self.cache is None else self.cache.get(point) for point in points]
        missing = [index for index, one in enumerate(known) if one is None]
        if missing:
            isolated.import_ahead()
        arguments = [(self.job, points[index], self.cluster) for index in missing]
        results = isolated.each(_record, arguments, self.jobs, RUN_SECONDS)
        for index, result in zip(missing, results, strict=True):
            known[index] = result[0]
            planned_tensors.learn(result[1])
            if self.cache is not None:
                self.cache.put(points[index], result[0])

        def recording_of(point: Point) -> Recording:
            found = known[points.index(point)]
            assert found is not None
            return found

        return recording_of


def estimates(layout: Layout, shape: Shape) -> bool:
    """Whether a search estimates the bytes of a layout, from recordings that others share."""
    return is_plain(layout, shape) or is_interleaved(shape)


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
    layers: Sequence[Layers],
) -> list[RankTrace]:
    """Trace with as many neighbours of a layer as matter, and real layers where bare ones differ.

    Raises:
        NotSpliceable: no trace fits.
    """
    ways = [(reach, kind) for kind in layers for reach in range(1, LARGEST_REACH + 1)]
    for reach, kind in ways:
        try:
            return traced(covering(layout, shape, ranks, reach, kind))
        except PlanError as error:  # such as transfers that end two layers later
            bare = kind is Layers.SHORT  # may crash where real ones do not
            crashed = not (bare or isinstance(error, NotSpliceable))
            if crashed or (reach, kind) == ways[-1]:
                raise
    raise AssertionError("unreachable")


def _points(cover: Cover) -> list[Point]:
    """All ranks to record, those that show what bare layers leave out included."""
    real = [*cover.chunks, *([cover.source] if cover.source is not None else [])]
    found = [point for one in (cover, *real) for point in one.points]
    if cover.source is not None:
        found += [one.bare_point for one in real]
    return found


def _built(layout: Layout, shape: Shape, ranks: Sequence[int]) -> list[Point | None]:
    """Ranks without a forward, if their buffers are padded for sharing; equal ranks once."""
    if not shape.distributed_optimizer:
        return [None for _ in ranks]
    names = [tuple((role, word) for role, word in shape.chunks_of(rank)) for rank in ranks]
    first = [ranks[names.index(name)] for name in names]
    return [Point(layout.overrides(), layout.devices, one, forward=False) for one in first]


def shape_of_layout(job: Job, layout: Layout) -> Shape:
    """The shape of a job in a layout; changes the state of this process.

    Raises:
        MindSpeedError: the job cannot start.
    """
    return shape_of(job.settings(layout.overrides(), layout.devices).args)


def _record(job: Job, point: Point, cluster: Cluster | None) -> tuple[Recording, list[Any]]:
    """A recording, and what the next process need not find again."""
    return record(job, point, cluster), planned_tensors.learned()
