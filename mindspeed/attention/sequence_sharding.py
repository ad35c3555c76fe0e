"""How the tokens of a sequence are sharded over ranks: for every rank, ranges of positions.

    zigzag(8, ranks=2).segments    (((0, 2), (6, 8)), ((2, 6),))

A batch is one long sequence: sample n of length S has the positions ``n S`` to ``(n + 1) S - 1``.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mindspeed.device.host_tensors import with_values
from mindspeed.errors import ConfigError

Range = tuple[int, int]
Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class SequenceSharding:
    """The positions that every rank owns.

    Attributes:
        segments: For each rank its ranges, in the order of the rows of its tensors.
    """

    segments: tuple[Ranges, ...]

    @property
    def ranks(self) -> int:
        return len(self.segments)

    @functools.cached_property
    def size(self) -> int:
        """Number of positions, of all ranks."""
        return sum(length(own) for own in self.segments)

    @with_values
    def positions(self, rank: int) -> torch.Tensor:
        """Position of each row of a rank's tensors: ``[rows]`` int64."""
        return torch.cat([torch.arange(0), *(torch.arange(a, b) for a, b in self.segments[rank])])

    def owned(self, wanted: Iterable[Range]) -> dict[int, list[Range]]:
        """Split ranges by owner: rank -> its parts, by ascending position."""
        starts, segments = self._sorted
        found: dict[int, list[Range]] = {}
        for a, b in wanted:
            at = max(bisect.bisect_right(starts, a) - 1, 0)
            while at < len(segments) and segments[at][0] < b:
                start, end, rank = segments[at]
                if end > a:
                    found.setdefault(rank, []).append((max(a, start), min(b, end)))
                at += 1
        return found

    @functools.cached_property
    def _sorted(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        segments = sorted((a, b, rank) for rank, own in enumerate(self.segments) for a, b in own)
        return [a for a, _, _ in segments], segments


class PositionIndex:
    """Maps positions to the rows of a tensor that holds some ranges, concatenated.

    Attributes:
        ranges: In the order of the rows.
        rows: Number of rows.
    """

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.ranges = tuple(ranges)
        starts: list[tuple[int, int, int]] = []
        row = 0
        for a, b in self.ranges:
            starts.append((a, b, row))
            row += b - a
        self.rows = row
        self._sorted = sorted(starts)
        self._starts = [a for a, _, _ in self._sorted]

    def has(self, ranges: Iterable[Range]) -> bool:
        """Whether the tensor holds all these positions."""
        try:
            return all(rows is not None for rows in self.slices(ranges))
        except KeyError:
            return False

    def slices(self, ranges: Iterable[Range]) -> Iterator[slice]:
        """The rows of some ranges; each may span several of the ranges held.

        Raises:
            KeyError: The tensor does not hold a position.
        """
        for a, b in ranges:
            at = max(bisect.bisect_right(self._starts, a) - 1, 0)
            while a < b:
                if at == len(self._sorted) or not self._sorted[at][0] <= a < self._sorted[at][1]:
                    raise KeyError(f"position {a} is not held here")
                start, end, row = self._sorted[at]
                stop = min(end, b)
                yield slice(row + a - start, row + stop - start)
                a, at = stop, at + 1


def length(ranges: Iterable[Range]) -> int:
    """Number of positions in some ranges."""
    return sum(b - a for a, b in ranges)


def union(ranges: Iterable[Range]) -> Ranges:
    """The positions of all ranges, as disjoint ascending ranges."""
    merged: list[list[int]] = []
    for a, b in sorted(ranges):
        if a >= b:
            continue
        if merged and a <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], b)
        else:
            merged.append([a, b])
    return tuple((a, b) for a, b in merged)


def without(ranges: Iterable[Range], taken: Iterable[Range]) -> Ranges:
    """The positions of ``ranges`` that are not in ``taken``."""
    left: list[Range] = []
    holes = union(taken)
    for a, b in union(ranges):
        for hole_a, hole_b in holes:
            if hole_b <= a or hole_a >= b:
                continue
            if hole_a > a:
                left.append((a, hole_a))
            a = max(a, hole_b)
            if a >= b:
                break
        if a < b:
            left.append((a, b))
    return tuple(left)


def contiguous(size: int, ranks: int, samples: int = 1) -> SequenceSharding:
    """Rank r owns the r-th part of every sample; their lengths differ by at most one token."""
    cuts = [size * rank // ranks for rank in range(ranks + 1)]
    parts = [[(cuts[rank], cuts[rank + 1])] for rank in range(ranks)]
    return _for_samples(parts, size, samples)


def indivisible(size: int, ranks: int) -> str:
    """Why a sample cannot be sharded, and what to do."""
    return (
        f"sequence length S={size} must be divisible by 2*CP={2 * ranks} (Megatron slices zigzag); "
        "pack documents or use adaptive_cp_algo"
    )


def zigzag(size: int, ranks: int, samples: int = 1) -> SequenceSharding:
    """Rank r owns chunks r and 2 P - 1 - r of 2 P chunks: equal causal work, Megatron's sharding.

    Raises:
        ConfigError: 2 P does not divide the size.
    """
    if size % (2 * ranks):
        raise ConfigError(f"context parallel: {indivisible(size, ranks)}")
    chunk = size // (2 * ranks)
    parts = [
        [(r * chunk, (r + 1) * chunk), (size - (r + 1) * chunk, size - r * chunk)]
        for r in range(ranks)
    ]
    return _for_samples(parts, size, samples)


def _for_samples(parts: list[list[Range]], size: int, samples: int) -> SequenceSharding:
    own: list[list[Range]] = []
    for ranges in parts:
        found: list[Range] = []
        for start in range(0, samples * size, size):
            for a, b in ranges:
                if found and found[-1][1] == start + a and a > 0:  # one range within a sample
                    found[-1] = (found[-1][0], start + b)
                elif b > a:
                    found.append((start + a, start + b))
        own.append(found)
    return SequenceSharding(tuple(map(tuple, own)))
