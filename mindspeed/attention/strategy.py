"""A context-parallel algorithm and its parameters: chooses the sharding and makes the plan.

    strategy = Strategy("hybrid", ulysses_degree=2)
    sharding = strategy.sharding(mask, ranks)   # the tokens of every rank
    plan = strategy.plan(mask, sharding)        # of the outer ranks, between the all-to-alls

    ring             keys and values are sent from neighbour to neighbour
    all_gather       every rank receives all keys and values
    needed           every rank receives the keys and values that its queries attend to
    ulysses          all-to-all from sequence to heads among all ranks
    hybrid           all-to-all among U neighbours, a ring of these groups
    adaptive         a sharding chosen for the mask, then ``needed``
    hybrid_adaptive  all-to-all among U neighbours, ``adaptive`` between these groups

A strategy is built once from the flags. All ranks have the same one, hence the same shardings and
plans.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from mindspeed.attention import planners
from mindspeed.attention.cost_metrics import cost_metrics
from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Plan
from mindspeed.attention.sequence_sharding import (
    Range,
    Ranges,
    SequenceSharding,
    contiguous,
    length,
    union,
    zigzag,
)
from mindspeed.errors import ConfigError

# A tuple: words of ours, which nobody gave; parsers and callers give a list or a word. Its type
# survives copies, pickles and checkpoints of the arguments, and Megatron reads it like a list.
COMM_TYPE_NOT_GIVEN = ("p2p",)
"""Default of ``--cp-comm-type`` in the parsers."""

Algorithm = Literal[
    "ring", "all_gather", "needed", "ulysses", "hybrid", "adaptive", "hybrid_adaptive"
]
COMM_TYPES: dict[str, Algorithm] = {
    "p2p": "ring",
    "all_gather": "all_gather",
    "a2a": "ulysses",
    "a2a+p2p": "hybrid",
}
"""Names of Megatron's ``--cp-comm-type``."""

_BALANCED = 0.95
"""Least balance of a sharding that is preferred for sending fewer rows."""


@dataclass(frozen=True)
class Strategy:
    """Choice of how a context-parallel group computes attention.

    Attributes:
        algorithm: One of the table above.
        ulysses_degree: Ranks of an all-to-all, of the two hybrids.
        ring_window: Ranks of an inner ring (double ring); 1 for a single ring.
        granularity: Adaptive shardings move multiples of this many tokens.
        overlap: Stages in which needed rows arrive, each during the work of the previous one.
        reshard: Adaptive algorithms may shard otherwise than Megatron's batches.
        head_groups: Of ``all_gather``: gather and compute key heads in this many chunks.
        fused_merge: Merge partial outputs with one fused operator.
        cache: Keys and values saved for backward (:mod:`.planners.kv_cache`).
        cache_interval: Number of layers without a cache after each layer with one.
    """

    algorithm: Algorithm = "ring"
    ulysses_degree: int = 1
    ring_window: int = 1
    granularity: int = 128
    overlap: int = 2
    reshard: bool = True
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
        """Strategy of a layer's entry in Megatron's ``--cp-comm-type``.

        Args:
            comm_type: One of :data:`COMM_TYPES`; None for ``p2p``.
            ulysses_degree: Of ``a2a+p2p``: ranks of the lowest level of the hierarchy.

        Raises:
            ConfigError: Unknown type.
        """
        name = comm_type or "p2p"
        if name not in COMM_TYPES:
            raise ConfigError(f"cp_comm_type {name!r} is not one of {', '.join(COMM_TYPES)}")
        return cls(COMM_TYPES[name], ulysses_degree if name == "a2a+p2p" else 1)

    @property
    def adaptive(self) -> bool:
        """Whether shardings depend on the mask."""
        return self.reshard and self.algorithm in ("adaptive", "hybrid_adaptive")

    @property
    def hybrid(self) -> bool:
        """Whether an all-to-all among neighbours is combined with a plan of the groups."""
        return self.algorithm in ("hybrid", "hybrid_adaptive")

    def ulysses_ranks(self, ranks: int) -> int:
        """Size of the all-to-all groups; 1 for none."""
        return ranks if self.algorithm == "ulysses" else self.ulysses_degree

    def sharding(self, mask: Mask, ranks: int, samples: int = 1) -> SequenceSharding:
        """The tokens of every rank, where the strategy may choose.

        Adaptive strategies shard by the mask. The others use the zigzag sharding of Megatron's
        batches; contiguous parts where 2 P does not divide the length, and for ``needed`` where
        that sends fewer rows (sliding windows).
        """
        if self.adaptive:
            outer = planners.adaptive_sharding(
                mask, ranks // self.ulysses_ranks(ranks), self.granularity
            )
            return _split_ranks(outer, self.ulysses_ranks(ranks))
        size = mask.size // samples
        parts = contiguous(size, ranks, samples)
        if size % (2 * ranks):
            return parts
        balanced = zigzag(size, ranks, samples)
        if self.algorithm != "needed":
            return balanced
        costs = [cost_metrics(self.plan(mask, sharding)) for sharding in (balanced, parts)]
        gains = (
            max(costs[1].kv_received) < max(costs[0].kv_received) and costs[1].balance >= _BALANCED
        )
        return parts if gains else balanced

    def plan(self, mask: Mask, sharding: SequenceSharding, layer: int = 1) -> Plan:
        """The plan of the outer ranks; cached by arguments.

        Args:
            mask: Of all samples.
            sharding: Of the whole group.
            layer: Number of the layer in the model, 1-based.

        Returns:
            A plan in which each all-to-all group is one rank: of all ranks where there is no
            all-to-all, of one rank for ``ulysses``.
        """
        return _plan(self, mask, sharding, self.cache_of(layer))

    def cache_of(self, layer: int) -> str | None:
        """The cache policy of a layer, 1-based."""
        return self.cache if (layer - 1) % (self.cache_interval + 1) == 0 else None

    def outer(self, sharding: SequenceSharding) -> SequenceSharding:
        """The positions of each all-to-all group, ascending."""
        return _merge_ranks(sharding, self.ulysses_ranks(sharding.ranks))


@functools.lru_cache(maxsize=256)
def _plan(strategy: Strategy, mask: Mask, sharding: SequenceSharding, cache: str | None) -> Plan:
    outer = strategy.outer(sharding)
    if strategy.algorithm == "all_gather":
        plan = planners.all_gather(mask, outer)
    elif strategy.algorithm in ("needed", "adaptive", "hybrid_adaptive"):
        plan = planners.needed_only(mask, outer, strategy.overlap)
    else:
        plan = planners.ring(mask, outer, strategy.ring_window)
    return planners.with_cache(plan, cache)


@functools.lru_cache(maxsize=256)
def _merge_ranks(sharding: SequenceSharding, inner: int) -> SequenceSharding:
    if inner == 1:
        return sharding
    groups = [sharding.segments[first : first + inner] for first in range(0, sharding.ranks, inner)]
    return SequenceSharding(tuple(union(part for own in group for part in own) for group in groups))


def _split_ranks(outer: SequenceSharding, inner: int) -> SequenceSharding:
    """Split each rank into ``inner`` ranks with equal numbers of its tokens, in its order."""
    if inner == 1:
        return outer
    return SequenceSharding(
        tuple(part for own in outer.segments for part in _equal_parts(own, inner))
    )


def _equal_parts(ranges: Ranges, count: int) -> Iterator[Ranges]:
    rows = length(ranges)
    bounds = [rows * part // count for part in range(count + 1)]
    for first, last in itertools.pairwise(bounds):
        yield tuple(_rows(ranges, first, last))


def _rows(ranges: Ranges, first: int, last: int) -> Iterator[Range]:
    row = 0
    for a, b in ranges:
        start, end = max(a, a + first - row), min(b, a + last - row)
        if start < end:
            yield start, end
        row += b - a
