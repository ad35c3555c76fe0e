"""What a mask costs, as arrays: pairs of any queries, keys that any layout has to receive.

The number of keys that a query sees is a straight line between a few positions: the ends of
documents, and where a window or a prefix begins to cut. Such a piece of the sequence has its number
of keys at the first query and a slope, and everything else follows in integers, for all segments of
a layout at once: a plan of 256K tokens costs milliseconds.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mindspeed.attention.layout import Layout, Range
from mindspeed.attention.mask import Mask

Ints = npt.NDArray[np.int64]


class Document(NamedTuple):
    """A range of queries and the number of pairs they are in."""

    start: int
    end: int
    pairs: int

    @property
    def tokens(self) -> int:
        """Length."""
        return self.end - self.start


class Segments:
    """Ranges of positions with their ranks, cut at the borders of pieces, sorted by rank and start.

    Attributes:
        rank: Who owns them.
        start: First positions.
        end: Behind the last positions.
    """

    def __init__(self, rank: Ints, start: Ints, end: Ints) -> None:
        self.rank, self.start, self.end = rank, start, end

    def layout(self, ranks: int) -> Layout:
        """Adjacent segments joined."""
        own: list[list[Range]] = [[] for _ in range(ranks)]
        rows = (self.rank.tolist(), self.start.tolist(), self.end.tolist())
        for rank, start, end in zip(*rows, strict=True):
            if own[rank] and own[rank][-1][1] == start:
                own[rank][-1] = (own[rank][-1][0], end)
            else:
                own[rank].append((start, end))
        return Layout(tuple(tuple(ranges) for ranges in own))


class Workload:
    """A mask, ready to price layouts.

    Attributes:
        size: Positions.
        border: First position of each piece, and the size.
        keys: Keys that the first query of each piece sees.
        slope: By how many they grow from one query to the next.
        area: Pairs of all pieces before each, and of all.
        documents: Ranges that see nothing of each other, in ascending order.
    """

    def __init__(self, mask: Mask) -> None:
        self.size = mask.size
        table = np.array(mask.regions, np.int64).reshape(-1, 6)
        q0, q1, k0, k1, lo, hi = table.T
        kinks = np.concatenate((q0, q1, np.clip(k0 - lo, q0, q1), np.clip(k1 - 1 - hi, q0, q1)))
        self.border = np.unique(np.concatenate((kinks, [0, mask.size])))
        self._regions_of_pieces(table)
        first = self._visible(self.border[:-1])
        last = self._visible(self.border[1:] - 1)
        length = np.diff(self.border)
        self.keys = first
        self.slope = (last - first) // np.maximum(length - 1, 1)
        areas = length * first + self.slope * (length * (length - 1) // 2)
        self.area = np.concatenate(([0], np.cumsum(areas)))
        self._lists = [x.tolist() for x in (self.border, self.keys, self.slope, self.area)]
        cuts = _cuts(np.minimum(q0, k0), np.maximum(q1, k1), mask.size)
        self.documents = self.documents_between(cuts)

    def _regions_of_pieces(self, table: Ints) -> None:
        """For each piece the regions that its queries see: rows of ``_region`` from ``_first``."""
        begin, end = (np.searchsorted(self.border, table[:, i]) for i in (0, 1))
        count = end - begin
        piece = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - begin, count)
        order = np.argsort(piece, kind="stable")
        self._region = np.repeat(table[:, 2:], count, axis=0)[order].T
        self._first = np.searchsorted(piece[order], np.arange(len(self.border)))

    def _visible(self, query: Ints) -> Ints:
        """Keys seen by one query of each piece."""
        k0, k1, lo, hi = self._region
        at = np.repeat(query, np.diff(self._first))
        seen = np.minimum(k1, at + hi + 1) - np.maximum(k0, at + lo)
        total = np.concatenate(([0], np.cumsum(seen)))
        return total[self._first[1:]] - total[self._first[:-1]]

    def piece(self, position: Ints) -> Ints:
        """The pieces of positions."""
        return np.searchsorted(self.border, position, side="right") - 1

    def area_before(self, position: Ints) -> Ints:
        """Pairs of all queries before each position."""
        piece = np.minimum(self.piece(position), len(self.keys) - 1)
        rows = position - self.border[piece]
        return (
            self.area[piece]
            + rows * self.keys[piece]
            + self.slope[piece] * (rows * (rows - 1) // 2)
        )

    def documents_between(self, borders: Sequence[int]) -> list[Document]:
        """Ranges between ascending borders."""
        at = np.asarray(borders, np.int64)
        pairs = np.diff(self.area_before(at))
        rows = (at[:-1].tolist(), at[1:].tolist(), pairs.tolist())
        return [Document(*row) for row in zip(*rows, strict=True)]

    def pairs(self, start: int, end: int) -> int:
        """Pairs of the queries of one range."""
        return self._before(end) - self._before(start)

    def _before(self, position: int) -> int:
        border, keys, slope, area = self._lists
        piece = min(bisect_right(border, position), len(keys)) - 1
        rows = position - border[piece]
        return int(area[piece] + rows * keys[piece] + slope[piece] * (rows * (rows - 1) // 2))

    def cut(self, layout: Sequence[Sequence[Range]]) -> Segments:
        """The segments of a layout."""
        parts = [(rank, a, b) for rank, own in enumerate(layout) for a, b in own if a < b]
        rank, first, last = np.array(parts, np.int64).reshape(-1, 3).T
        begin = self.piece(first)
        count = np.searchsorted(self.border, last) - begin
        piece = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - begin, count)
        start = np.maximum(np.repeat(first, count), self.border[piece])
        end = np.minimum(np.repeat(last, count), self.border[piece + 1])
        rank = np.repeat(rank, count)
        order = np.argsort(rank * (self.size + 1) + start, kind="stable")
        return Segments(rank[order], start[order], end[order])

    def areas(self, segments: Segments, ranks: int) -> Ints:
        """Pairs of each rank."""
        return _sum(
            self.area_before(segments.end) - self.area_before(segments.start), segments.rank, ranks
        )

    def received(self, segments: Segments, ranks: int) -> Ints:
        """Keys that each rank sees and does not own."""
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
        """Ranges of keys that segments see, with their ranks."""
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
        """First and behind the last key that segments see: exact where one region is in a piece."""
        low, high, low_slope, high_slope = self._hull
        first = low[piece] + (start - self.border[piece]) * low_slope[piece]
        last = high[piece] - (self.border[piece + 1] - end) * high_slope[piece]
        return first, np.maximum(first, last)

    @functools.cached_property
    def _hull(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Of whole pieces, and whether the ends move with the query."""
        start, end = self.border[:-1], self.border[1:]
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
    """Sum for each rank."""
    total = np.zeros(ranks, np.int64)
    np.add.at(total, rank, values)
    return total


def _cuts(start: Ints, end: Ints, size: int) -> list[int]:
    """Positions that no range crosses, with 0 and the size."""
    order = np.argsort(start, kind="stable")
    starts, reach = start[order], np.maximum.accumulate(end[order])
    return [0, *starts[1:][starts[1:] >= reach[:-1]].tolist(), size]
