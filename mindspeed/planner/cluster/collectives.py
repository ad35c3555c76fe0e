"""Seconds of a collective over the levels of a cluster, by closed forms of its algorithms.

    levels = (Level("NVLink", 8, 450, 1.9), Level("InfiniBand", None, 50, 4.0))
    seconds("all_gather", shard_bytes, ranks=(0, 8, 16, 24), levels=levels)

A level is a set of devices that reach each other over one kind of link: a board, a node, a rack.
Consecutive ranks share a level. Every device has its own link at every level.

A group of p ranks has m ranks in each domain of the level below. In an SPMD program all groups of
the same kind communicate at once: the N links of a domain serve N/m groups, so each group has m
links. Thus the bandwidth of a group over level l is ``m * B_l`` (m = 1 at the innermost level).
With S bytes of result:

============  =================================================================================
ring          one ring through all ranks, ordered by level; each edge carries (p-1)/p S:
              ``max over levels of (p-1)/p S / (m_l B_l) + sum over p-1 edges of latency``
hierarchical  all-gather over the outermost level, then inwards, with q_l parts per level:
              ``sum over levels of (q_l - 1) (latency_l + shard_l / B_l)``; shards grow inwards
tree          ``S / bandwidth + sum over levels of ceil(log2 q_l) latency_l`` (all-reduce twice)
============  =================================================================================

The fastest algorithm is taken, as communication libraries do. All-reduce is a reduce-scatter and an
all-gather. In an all-to-all the links of all levels work at once. Not modelled: reductions inside
switches, congestion by other jobs, protocols for small messages.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005); Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast" (2009).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, log2, prod
from typing import Annotated

from mindspeed.json_fields import TEXT, Real, Whole, or_null


@dataclass(frozen=True)
class Level:
    """Links between devices that share a domain.

    Attributes:
        size: devices of a domain; None: all.
        gbs: bandwidth of one device in GB/s, in one direction.
        latency_us: microseconds of one step of an algorithm.
        efficiency: fraction of ``gbs`` that large messages attain.
    """

    name: Annotated[str, TEXT]
    size: Annotated[int | None, or_null(Whole(2))]
    gbs: Annotated[float, Real(1e-12)]
    latency_us: Annotated[float, Real(0)]
    efficiency: Annotated[float, Real(0.001, 1)] = 1.0
    source: Annotated[str, TEXT] = ""

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of one device for large messages."""
        return self.gbs * 1e9 * self.efficiency

    @property
    def latency(self) -> float:
        """Seconds of one step."""
        return self.latency_us * 1e-6

    def domain(self, rank: int) -> int:
        """Index of the domain of this level that contains the rank."""
        return 0 if self.size is None else rank // self.size


@dataclass(frozen=True)
class _Hop:
    """A level that a group crosses.

    Attributes:
        level: its links.
        parts: largest number of domains of the level below (innermost: ranks) in one domain.
        members: smallest number of ranks in a domain of the level below: links of the group here.
        inside: smallest number of ranks of the group in a domain of this level.
        edges: edges that cross this level, of a path through all ranks ordered by level.
    """

    level: Level
    parts: int
    members: int
    inside: int
    edges: int

    @property
    def bytes_per_second(self) -> float:
        return self.members * self.level.bytes_per_second


@dataclass(frozen=True)
class _Group:
    size: int
    hops: tuple[_Hop, ...]  # levels that it crosses, from inside out

    @property
    def bytes_per_second(self) -> float:
        return min(hop.bytes_per_second for hop in self.hops)

    @property
    def regular(self) -> bool:
        """Whether all domains hold equally many of its ranks."""
        return prod(hop.parts for hop in self.hops) == self.size

    @property
    def path_latency(self) -> float:
        return sum(hop.edges * hop.level.latency for hop in self.hops)

    @property
    def tree_latency(self) -> float:
        return sum(ceil(log2(hop.parts)) * hop.level.latency for hop in self.hops)


def seconds(op: str, payload: float, ranks: Sequence[int], levels: Sequence[Level]) -> float:
    """Seconds of one call, which all ranks make at the same moment.

    Args:
        op: name as in :mod:`mindspeed.instruments.ledger`.
        payload: bytes of one shard for all_gather and gather, else of the tensor of one rank.
        ranks: global ranks of the group; for send and recv the slowest pair of neighbours counts.
        levels: levels from inside out; the last one contains all ranks.

    Raises:
        ValueError: there is no such operation, or ranks are outside of all levels.
    """
    if op not in _SECONDS:
        raise ValueError(f"there is no collective {op!r}; there are {', '.join(_SECONDS)}")
    if len(ranks) < 2:
        return 0.0
    group = _group(tuple(ranks), tuple(levels))
    return _SECONDS[op](group, float(payload), ranks, levels)


@lru_cache(maxsize=4096)
def _group(ranks: tuple[int, ...], levels: tuple[Level, ...]) -> _Group:
    hops: list[_Hop] = []
    inner: list[int] = list(ranks)  # each rank's domain of the level below: itself
    for level in levels:
        outer = [level.domain(rank) for rank in ranks]
        members, inside = Counter(inner), Counter(outer)
        parts = max(Counter(domain for _, domain in set(zip(inner, outer, strict=True))).values())
        if parts > 1:
            edges = len(members) - len(inside)
            hops.append(_Hop(level, parts, min(members.values()), min(inside.values()), edges))
        inner = outer
    if len(set(inner)) > 1:
        raise ValueError(
            f"ranks {min(ranks)} to {max(ranks)} are not all in one domain of {levels[-1].size} "
            f"devices, the outermost level ({levels[-1].name})"
        )
    return _Group(len(ranks), tuple(hops))


def _gathering(group: _Group, total: float) -> float:
    """All-gather or reduce-scatter of ``total`` bytes."""
    rest = (group.size - 1) / group.size * total
    ring = rest / group.bytes_per_second + group.path_latency
    if not group.regular:
        return ring
    shard, hierarchical = total / group.size, 0.0
    for hop in reversed(group.hops):
        link = hop.level
        hierarchical += (hop.parts - 1) * (link.latency + shard / link.bytes_per_second)
        shard *= hop.parts
    return min(ring, hierarchical)


def _all_gather(group: _Group, payload: float, *_: object) -> float:
    return _gathering(group, payload * group.size)


def _reduce_scatter(group: _Group, payload: float, *_: object) -> float:
    return _gathering(group, payload)


def _all_reduce(group: _Group, payload: float, *_: object) -> float:
    tree = payload / group.bytes_per_second + group.tree_latency
    return 2 * min(tree, _gathering(group, payload))


def _broadcast(group: _Group, payload: float, *_: object) -> float:
    latency = min(group.tree_latency, group.path_latency)
    return payload / group.bytes_per_second + latency


def _exchange(group: _Group, total: float, *_: object) -> float:
    """All-to-all of ``total / p`` bytes to each rank: links of all levels work at once."""
    longest, inner = 0.0, 1
    for hop in group.hops:
        sent = total * (hop.inside - inner) / group.size
        longest = max(longest, sent / hop.level.bytes_per_second)
        inner = hop.inside
    return longest + group.hops[-1].level.latency


def _gather(group: _Group, payload: float, *_: object) -> float:
    return _exchange(group, payload * group.size)


def _send(group: _Group, payload: float, ranks: Sequence[int], levels: Sequence[Level]) -> float:
    slowest = 0.0
    for left, right in pairwise(ranks):
        link = next(level for level in levels if level.domain(left) == level.domain(right))
        slowest = max(slowest, link.latency + payload / link.bytes_per_second)
    return slowest


_SECONDS: dict[str, Callable[[_Group, float, Sequence[int], Sequence[Level]], float]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _exchange,
    "broadcast": _broadcast,
    "reduce": _broadcast,
    "gather": _gather,
    "scatter": _gather,
    "barrier": _all_reduce,
    "send": _send,
    "recv": _send,
}
OPERATIONS = tuple(_SECONDS)
"""Names that :func:`seconds` knows."""
