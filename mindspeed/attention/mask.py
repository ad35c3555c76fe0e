"""Attention masks as rectangles with a diagonal band: never an S x S tensor.

Query ``i`` sees key ``j`` of a region iff ``i`` and ``j`` are in its ranges and
``lo <= j - i <= hi``:

    full      lo = -inf, hi = inf        window (l, r)   lo = -l, hi = r
    causal    lo = -inf, hi = 0          packed          one region per document

A mask is a list of disjoint regions. A batch is one long sequence: sample ``n`` of length S has the
positions ``n S`` to ``(n + 1) S - 1``, and no region spans two samples.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mindspeed.errors import ConfigError

INF = 1 << 62
"""An unlimited side of a band."""


class Region(NamedTuple):
    """Queries ``[q0, q1)`` and keys ``[k0, k1)`` with ``lo <= j - i <= hi``."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int = -INF
    hi: int = INF

    def area(self) -> int:
        """Number of pairs."""
        queries, keys, shift = self.q1 - self.q0, self.k1 - self.k0, self.q0 - self.k0
        if queries <= 0 or keys <= 0 or self.lo > self.hi:
            return 0
        return _pairs(queries, keys, self.hi + shift) - _pairs(queries, keys, self.lo + shift - 1)

    def crop(self, q0: int, q1: int, k0: int, k1: int) -> Region | None:
        """The part in a rectangle, without empty rows and columns; None if it has no pair.

        A side of the band that masks nothing is infinite in the result.
        """
        lo, hi = self.lo, self.hi
        q0, q1 = max(self.q0, q0), min(self.q1, q1)
        k0, k1 = max(self.k0, k0), min(self.k1, k1)
        q0, q1 = max(q0, k0 - hi), min(q1, k1 - lo)
        k0, k1 = max(k0, q0 + lo), min(k1, q1 + hi)
        if q0 >= q1 or k0 >= k1 or lo > hi:
            return None
        return Region(
            q0, q1, k0, k1,
            -INF if lo <= k0 - (q1 - 1) else lo,
            INF if hi >= (k1 - 1) - q0 else hi,
        )  # fmt: skip

    def shifted(self, queries: int, keys: int) -> Region:
        """The same region with offsets added to the query and key positions."""
        lo = self.lo if self.lo == -INF else self.lo + keys - queries
        hi = self.hi if self.hi == INF else self.hi + keys - queries
        return Region(self.q0 + queries, self.q1 + queries, self.k0 + keys, self.k1 + keys, lo, hi)


def _pairs(queries: int, keys: int, limit: int) -> int:
    """Pairs of a rectangle with ``j - i <= limit``, both counted from 0."""
    return _sum_to(limit + queries, keys) - _sum_to(limit, keys)


def _sum_to(x: int, n: int) -> int:
    """Sum of ``min(max(t, 0), n)`` over all ``t <= x``."""
    if x <= 0:
        return 0
    return x * (x + 1) // 2 if x <= n else n * (n + 1) // 2 + (x - n) * n


@dataclass(frozen=True)
class Mask:
    """The keys that every query of a sequence sees.

    Attributes:
        size: Number of positions, of all samples.
        regions: Disjoint, by ascending first query.
    """

    size: int
    regions: tuple[Region, ...]

    @classmethod
    def causal(cls, size: int, window: int | None = None) -> Mask:
        """One document; with ``window`` a query sees itself and ``window`` keys before it."""
        return cls.documents((0, size), window=None if window is None else (window, 0))

    @classmethod
    def full(cls, size: int) -> Mask:
        """Every query sees every key."""
        return cls.documents((0, size), causal=False)

    @classmethod
    def documents(
        cls,
        cu_seqlens: Sequence[int],
        *,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        prefix: int = 0,
    ) -> Mask:
        """Concatenated documents that do not attend to each other.

        Args:
            cu_seqlens: Cumulative lengths from 0 to the size; documents may be empty.
            causal: A query sees no later key.
            window: A query sees this many keys before and after it; None for all.
            prefix: Number of first keys of each document that all its queries see.

        Raises:
            ConfigError: ``cu_seqlens`` does not ascend from 0, or a number is negative.
        """
        bounds = [int(bound) for bound in cu_seqlens]
        if not bounds or bounds[0] != 0 or any(a > b for a, b in itertools.pairwise(bounds)):
            raise ConfigError(f"cu_seqlens must ascend from 0; given {_short(bounds)}")
        before, after = (INF, INF) if window is None else window
        if before < 0 or after < 0 or prefix < 0:
            raise ConfigError(f"window {window} and prefix {prefix} must not be negative")
        lo, hi = -before, min(after, 0) if causal else after
        regions: list[Region | None] = []
        for start, end in itertools.pairwise(bounds):
            first = min(start + prefix, end)
            regions.append(Region(start, end, start, first).crop(0, end, 0, end))
            regions.append(Region(start, end, first, end, lo, hi).crop(0, end, 0, end))
        return cls(bounds[-1], tuple(region for region in regions if region is not None))

    @classmethod
    def of_regions(cls, size: int, regions: Sequence[Region]) -> Mask:
        """A mask of the given regions.

        Raises:
            ConfigError: Two regions share a pair, or a query sees no key.
        """
        kept = [region.crop(0, size, 0, size) for region in regions]
        found = sorted(region for region in kept if region is not None)
        for number, region in enumerate(found):
            for other in found[:number]:
                if shared := _intersection(region, other):
                    raise ConfigError(
                        f"mask regions {other} and {region} share the pair "
                        f"(query {shared.q0}, key {shared.k0})"
                    )
        mask = cls(size, tuple(found))
        if (row := mask.row_without_keys()) is not None:
            raise ConfigError(f"mask row {row} has no visible key")
        return mask

    @classmethod
    def batch(cls, masks: Sequence[Mask]) -> Mask:
        """The mask of concatenated samples."""
        regions: list[Region] = []
        start = 0
        for mask in masks:
            regions += [region.shifted(start, start) for region in mask.regions]
            start += mask.size
        return cls(start, tuple(regions))

    def area(self) -> int:
        """Number of pairs."""
        return sum(region.area() for region in self.regions)

    def regions_of(self, q0: int, q1: int) -> Sequence[Region]:
        """A superset of the regions with a query in ``[q0, q1)``."""
        first, last = self._reach
        return self.regions[bisect.bisect_right(last, q0) : bisect.bisect_left(first, q1)]

    @functools.cached_property
    def _reach(self) -> tuple[list[int], list[int]]:
        """First query of each region, and the running maximum of the ends of the queries."""
        ends = itertools.accumulate((region.q1 for region in self.regions), max)
        return [region.q0 for region in self.regions], list(ends)

    def row_without_keys(self) -> int | None:
        """The first query that sees no key, or None."""
        seen = 0
        for q0, q1 in sorted((region.q0, region.q1) for region in self.regions):
            if q0 > seen:
                return seen
            seen = max(seen, q1)
        return seen if seen < self.size else None

    def dense(self) -> torch.Tensor:
        """``[size, size]`` bool, True where a query sees a key: for tests and pictures."""
        keep = torch.zeros(self.size, self.size, dtype=torch.bool)
        for q0, q1, k0, k1, lo, hi in self.regions:
            distance = torch.arange(k0, k1)[None] - torch.arange(q0, q1)[:, None]
            keep[q0:q1, k0:k1] |= (distance >= lo) & (distance <= hi)
        return keep


def _intersection(one: Region, other: Region) -> Region | None:
    both = Region(*one[:4], max(one.lo, other.lo), min(one.hi, other.hi))
    return both.crop(*other[:4])


def _short(values: Sequence[int]) -> str:
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
