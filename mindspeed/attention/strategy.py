"""An algorithm and its parameters: what makes a layout and a plan of a mask.

    strategy = Strategy("hybrid", ulysses_degree=2)
    layout = strategy.layout(mask, ranks)     # who owns which tokens
    plan = strategy.plan(mask, layout)        # of the ranks that are left behind the exchange

    ring             keys and values go from neighbour to neighbour
    all_gather       every rank gets all keys and values
    needed           every rank gets the keys and values that its queries see
    ulysses          rows are exchanged for heads among all ranks
    hybrid           rows for heads among U neighbours, a ring of the groups of neighbours
    adaptive         a layout made for the mask, and then as ``needed``
    hybrid_adaptive  rows for heads among U neighbours, ``adaptive`` between the groups

A strategy is made of flags once and is the same on all ranks, and so are its layouts and plans.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from mindspeed.attention import planners
from mindspeed.attention.figures import figures
from mindspeed.attention.layout import Layout, Range, Ranges, contiguous, length, union, zigzag
from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Plan
from mindspeed.errors import ConfigError

Algorithm = Literal[
    "ring", "all_gather", "needed", "ulysses", "hybrid", "adaptive", "hybrid_adaptive"
]
COMM_TYPES: dict[str, Algorithm] = {
    "p2p": "ring",
    "all_gather": "all_gather",
    "a2a": "ulysses",
    "a2a+p2p": "hybrid",
}
"""What Megatron's ``--cp-comm-type`` calls them."""

_BALANCED = 0.95


@dataclass(frozen=True)
class Strategy:
    """How a group of ranks attends over a sequence that they share.

    Attributes:
        algorithm: See above.
        ulysses_degree: Neighbours that exchange rows for heads, of the two hybrids.
        ring_window: Neighbours in a window of the inner ring; 1 for a single ring.
        granularity: Tokens in the smallest piece that an adaptive layout moves.
        overlap: Steps in which needed rows arrive, each behind the work of the one before.
        relayout: May adaptive algorithms give ranks other tokens than Megatron's batches do?
        head_groups: Of ``all_gather``: key heads in so many parts, one behind the other.
        fused_merge: Merge partial outputs by one operator.
        cache: What stays from the forward to the backward pass (:mod:`.planners.cache`).
        cache_interval: Layers without a cache behind each that has one.
    """

    algorithm: Algorithm = "ring"
    ulysses_degree: int = 1
    ring_window: int = 1
    granularity: int = 128
    overlap: int = 2
    relayout: bool = True
    head_groups: int = 1
    fused_merge: bool = False
    cache: Literal["full", "half"] | None = None
    cache_interval: int = 0

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm):
            raise ConfigError(
                f"algorithm {self.algorithm!r} is not one of {', '.join(get_args(Algorithm))}"
            )

    @classmethod
    def from_comm_type(cls, comm_type: str | None, ulysses_degree: int = 1) -> Strategy:
        """What Megatron's ``--cp-comm-type`` of a layer says.

        Args:
            comm_type: One of :data:`COMM_TYPES`; None for ``p2p``.
            ulysses_degree: Of ``a2a+p2p``: ranks of the lowest level of the hierarchy.

        Raises:
            ConfigError: There is no such type.
        """
        name = comm_type or "p2p"
        if name not in COMM_TYPES:
            raise ConfigError(f"cp_comm_type {name!r} is not one of {', '.join(COMM_TYPES)}")
        return cls(COMM_TYPES[name], ulysses_degree if name == "a2a+p2p" else 1)

    @property
    def adaptive(self) -> bool:
        """Do layouts depend on the mask?"""
        return self.relayout and self.algorithm in ("adaptive", "hybrid_adaptive")

    @property
    def hybrid(self) -> bool:
        """Do neighbours exchange rows for heads before the others come in?"""
        return self.algorithm in ("hybrid", "hybrid_adaptive")

    def exchanging(self, ranks: int) -> int:
        """How many of the ranks exchange rows for heads with each other; 1 for none."""
        return ranks if self.algorithm == "ulysses" else self.ulysses_degree

    def layout(self, mask: Mask, ranks: int, samples: int = 1) -> Layout:
        """Who owns which tokens where the strategy may choose.

        Adaptive strategies fit the layout to the mask. The others take the zigzag of Megatron's
        batches; contiguous parts where the length does not divide, and for ``needed`` where that
        moves fewer rows (sliding windows).

        Args:
            mask: Of all samples.
            ranks: Of the whole group.
            samples: Samples of equal length, one behind the other.
        """
        if self.adaptive:
            outer = planners.adaptive_layout(
                mask, ranks // self.exchanging(ranks), self.granularity
            )
            return _shared(outer, self.exchanging(ranks))
        size = mask.size // samples
        parts = contiguous(size, ranks, samples)
        if size % (2 * ranks):
            return parts
        balanced = zigzag(size, ranks, samples)
        if self.algorithm != "needed":
            return balanced
        costs = [figures(self.plan(mask, layout)) for layout in (balanced, parts)]
        gains = max(costs[1].fetched) < max(costs[0].fetched) and costs[1].balance >= _BALANCED
        return parts if gains else balanced

    def plan(self, mask: Mask, layout: Layout, layer: int = 1) -> Plan:
        """Who fetches which keys when, and multiplies what; made once for equal arguments.

        Args:
            mask: Of all samples.
            layout: Of the whole group.
            layer: Number of the layer in the model, from 1.

        Returns:
            A plan of the groups of ranks that exchange heads, each as one rank: of all ranks where
            there is no exchange, of one rank for ``ulysses``.
        """
        return _plan(self, mask, layout, self.cache_of(layer))

    def cache_of(self, layer: int) -> str | None:
        """The cache of a layer, numbered from 1."""
        return self.cache if (layer - 1) % (self.cache_interval + 1) == 0 else None

    def outer(self, layout: Layout) -> Layout:
        """Tokens of each group of ranks that exchange rows for heads, in ascending order."""
        return _merged(layout, self.exchanging(layout.ranks))


@functools.lru_cache(maxsize=256)
def _plan(strategy: Strategy, mask: Mask, layout: Layout, cache: str | None) -> Plan:
    outer = strategy.outer(layout)
    if strategy.algorithm == "all_gather":
        plan = planners.all_gather(mask, outer)
    elif strategy.algorithm in ("needed", "adaptive", "hybrid_adaptive"):
        plan = planners.needed_only(mask, outer, strategy.overlap)
    else:
        plan = planners.ring(mask, outer, strategy.ring_window)
    return planners.with_cache(plan, cache)


@functools.lru_cache(maxsize=256)
def _merged(layout: Layout, inner: int) -> Layout:
    if inner == 1:
        return layout
    groups = [layout.segments[first : first + inner] for first in range(0, layout.ranks, inner)]
    return Layout(tuple(union(part for own in group for part in own) for group in groups))


def _shared(outer: Layout, inner: int) -> Layout:
    """Ranks in place of each rank: equal numbers of its tokens, in its order."""
    if inner == 1:
        return outer
    return Layout(tuple(part for own in outer.segments for part in _equal_parts(own, inner)))


def _equal_parts(ranges: Ranges, count: int) -> Iterator[Ranges]:
    rows = length(ranges)
    cuts = [rows * part // count for part in range(count + 1)]
    for first, last in itertools.pairwise(cuts):
        yield tuple(_rows(ranges, first, last))


def _rows(ranges: Ranges, first: int, last: int) -> Iterator[Range]:
    row = 0
    for a, b in ranges:
        start, end = max(a, a + first - row), min(b, a + last - row)
        if start < end:
            yield start, end
        row += b - a
