"""The work of a mask as arrays: pairs of any queries, and keys that any sharding must receive.

The number of keys that a query sees is piecewise linear in its position; it bends at the ends of
documents and where a window or a prefix starts to mask. A *piece* of the sequence is described by
the number of keys of its first query and a slope, from which everything follows in integers, for
all segments of a sharding at once: planning 256K tokens takes milliseconds.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mindspeed.attention.mask import Mask
from mindspeed.attention.sequence_sharding import Range, SequenceSharding

Ints = npt.NDArray[np.int64]


class Document(NamedTuple):
    """A range of queries and the number of pairs of its queries."""

    start: int
    end: int
    pairs: int

    @property
    def tokens(self) -> int:
        """Length."""
        return self.end - self.start


class Segments:
    """Ranges of positions, split at the bounds of pieces, sorted by rank and start.

    Attributes:
        rank: Owners ``[segments]``.
        start: First positions ``[segments]``.
        end: Ends, exclusive ``[segments]``.
    """

    def __init__(self, rank: Ints, start: Ints, end: Ints) -> None:
        self.rank, self.start, self.end = rank, start, end

    def sharding(self, ranks: int) -> SequenceSharding:
        """The sharding with adjacent segments joined."""
        own: list[list[Range]] = [[] for _ in range(ranks)]
        rows = (self.rank.tolist(), self.start.tolist(), self.end.tolist())
        for rank, start, end in zip(*rows, strict=True):
            if own[rank] and own[rank][-1][1] == start:
                own[rank][-1] = (own[rank][-1][0], end)
            else:
                own[rank].append((start, end))
        return SequenceSharding(tuple(tuple(ranges) for ranges in own))


class Workload:
    """A mask, prepared to evaluate shardings.

    Attributes:
        size: Number of positions.
        bound: First position of each piece, and the size ``[pieces + 1]``.
        keys: Number of keys that the first query of each piece sees ``[pieces]``.
        slope: Its increase from one query to the next ``[pieces]``.
        area: Pairs of all earlier pieces, and of all ``[pieces + 1]``.
        documents: Ranges that do not attend to each other, ascending.
    """

    def __init__(self, mask: Mask) -> None:
        self.size = mask.size
        table = np.array(mask.regions, np.int64).reshape(-1, 6)
        q0, q1, k0, k1, lo, hi = table.T
        kinks = np.concatenate((q0, q1, np.clip(k0 - lo, q0, q1), np.clip(k1 - 1 - hi, q0, q1)))
        self.bound = np.unique(np.concatenate((kinks, [0, mask.size])))
        self._regions_of_pieces(table)
        first = self._visible(self.bound[:-1])
        last = self._visible(self.bound[1:] - 1)
        length = np.diff(self.bound)
        self.keys = first
        self.slope = (last - first) // np.maximum(length - 1, 1)
        areas = length * first + self.slope * (length * (length - 1) // 2)
        self.area = np.concatenate(([0], np.cumsum(areas)))
        self._lists = [x.tolist() for x in (self.bound, self.keys, self.slope, self.area)]
        bounds = _bounds(np.minimum(q0, k0), np.maximum(q1, k1), mask.size)
        self.documents = self.documents_between(bounds)

    def _regions_of_pieces(self, table: Ints) -> None:
        """Regions of the queries of each piece: columns of ``_region`` from ``_first``."""
        begin, end = (np.searchsorted(self.bound, table[:, i]) for i in (0, 1))
        count = end - begin
        piece = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - begin, count)
        order = np.argsort(piece, kind="stable")
        self._region = np.repeat(table[:, 2:], count, axis=0)[order].T
        self._first = np.searchsorted(piece[order], np.arange(len(self.bound)))

    def _visible(self, query: Ints) -> Ints:
        """Number of keys seen by one query of each piece."""
        k0, k1, lo, hi = self._region
        at = np.repeat(query, np.diff(self._first))
        seen = np.minimum(k1, at + hi + 1) - np.maximum(k0, at + lo)
        total = np.concatenate(([0], np.cumsum(seen)))
        return total[self._first[1:]] - total[self._first[:-1]]

    def piece(self, position: Ints) -> Ints:
        return np.searchsorted(self.bound, position, side="right") - 1

    def area_before(self, position: Ints) -> Ints:
        """Pairs of all queries before each position."""
        piece = np.minimum(self.piece(position), len(self.keys) - 1)
        rows = position - self.bound[piece]
        return (
            self.area[piece]
            + rows * self.keys[piece]
            + self.slope[piece] * (rows * (rows - 1) // 2)
        )

    def documents_between(self, bounds: Sequence[int]) -> list[Document]:
        """The ranges between ascending bounds."""
        at = np.asarray(bounds, np.int64)
        pairs = np.diff(self.area_before(at))
        rows = (at[:-1].tolist(), at[1:].tolist(), pairs.tolist())
        return [Document(*row) for row in zip(*rows, strict=True)]

    def pairs(self, start: int, end: int) -> int:
        """Number of pairs of a range of queries."""
        return self._before(end) - self._before(start)

    def _before(self, position: int) -> int:
        bound, keys, slope, area = self._lists
        piece = min(bisect_right(bound, position), len(keys)) - 1
        rows = position - bound[piece]
        return int(area[piece] + rows * keys[piece] + slope[piece] * (rows * (rows - 1) // 2))

    def split(self, sharding: Sequence[Sequence[Range]]) -> Segments:
        """The segments of a sharding, split at the bounds of pieces."""
        parts = [(rank, a, b) for rank, own in enumerate(sharding) for a, b in own if a < b]
        rank, first, last = np.array(parts, np.int64).reshape(-1, 3).T
        begin = self.piece(first)
        count = np.searchsorted(self.bound, last) - begin
        piece = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - begin, count)
        start = np.maximum(np.repeat(first, count), self.bound[piece])
        end = np.minimum(np.repeat(last, count), self.bound[piece + 1])
        rank = np.repeat(rank, count)
        order = np.argsort(rank * (self.size + 1) + start, kind="stable")
        return Segments(rank[order], start[order], end[order])

    def areas(self, segments: Segments, ranks: int) -> Ints:
        """Number of pairs of each rank."""
        return _sum(
            self.area_before(segments.end) - self.area_before(segments.start), segments.rank, ranks
        )

    def received(self, segments: Segments, ranks: int) -> Ints:
        """Number of keys that each rank sees and does not own."""
        rank, k0, k1 = self._seen(segments)
        base = np.concatenate((rank, segments.rank)) * (self.size + 1)
        start = base + np.concatenate((k0, segments.start))
        end = base + np.concatenate((k1, segments.end))
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        reach = np.maximum.accumulate(end)
        covered = np.concatenate(([0], reach[:-1]))
        union = np.maximum(end - np.maximum(start, covered), 0)
        own = _sum(segments.end - segments.start, segments.rank, ranks)
        return _sum(union, start // (self.size + 1), ranks) - own

    def _seen(self, segments: Segments) -> tuple[Ints, Ints, Ints]:
        """Ranges of keys that segments see: rank, start, end."""
        piece = self.piece(segments.start)
        count = self._first[piece + 1] - self._first[piece]
        at = np.arange(count.sum()) - np.repeat(
            np.cumsum(count) - count - self._first[piece], count
        )
        k0, k1, lo, hi = self._region[:, at]
        first = np.maximum(k0, np.repeat(segments.start, count) + lo)
        last = np.minimum(k1, np.repeat(segments.end, count) + hi)
        return np.repeat(segments.rank, count), first, last

    def hull(self, start: Ints, end: Ints, piece: Ints) -> tuple[Ints, Ints]:
        """First and end of the keys that segments see; exact for pieces of one region."""
        low, high, low_slope, high_slope = self._hull
        first = low[piece] + (start - self.bound[piece]) * low_slope[piece]
        last = high[piece] - (self.bound[piece + 1] - end) * high_slope[piece]
        return first, np.maximum(first, last)

    @functools.cached_property
    def _hull(self) -> tuple[Ints, Ints, Ints, Ints]:
        """First and end of the keys of whole pieces, and whether they shift with the query."""
        start, end = self.bound[:-1], self.bound[1:]
        low, high = self._extremes(start, end)
        low_of_last, _ = self._extremes(end - 1, end)
        _, high_of_first = self._extremes(start, start + 1)
        rows = np.maximum(end - start - 1, 1)
        return low, high, (low_of_last - low) // rows, (high - high_of_first) // rows

    def _extremes(self, start: Ints, end: Ints) -> tuple[Ints, Ints]:
        piece, first, last = self._seen(Segments(np.arange(len(start)), start, end))
        low, high = np.full(len(start), self.size), np.zeros(len(start), np.int64)
        np.minimum.at(low, piece, first)
        np.maximum.at(high, piece, last)
        return np.minimum(low, self.size), high


def _sum(values: Ints, rank: Ints, ranks: int) -> Ints:
    total = np.zeros(ranks, np.int64)
    np.add.at(total, rank, values)
    return total


def _bounds(start: Ints, end: Ints, size: int) -> list[int]:
    """Positions that no range spans, with 0 and the size."""
    order = np.argsort(start, kind="stable")
    starts, reach = start[order], np.maximum.accumulate(end[order])
    return [0, *starts[1:][starts[1:] >= reach[:-1]].tolist(), size]
