"""Mesh attention: queries travel along one side of a mesh of ranks, keys along the other.

Ranks are a mesh of a x b. Rank (x, y) gets the queries of the a ranks of its column x and the keys
and values of the b ranks of its row y, and computes the tile where they meet. Partial outputs go
back along the column with their log-sum-exp. Forward and backward together, in units of a rank's
own rows, with g query heads for each key head:

    a rank receives   (a - 1) 5 Q + (b - 1) 3 KV,   Q = g KV / 2

which for many ranks and few query heads for each key head is far less than the 3 (P - 1) KV of a
ring, a mesh of 1 x P: at P = 64 and g = 1 a fifth. With the zigzag layout every tile of a causal
mask has the same work.

In the backward pass queries come with the gradient of their output and two numbers for each head,
the log-sum-exp and delta = sum(dout * out); the output itself stays at home.

Source: Chen et al., "Mesh-Attention" (2025).
"""

from __future__ import annotations

from mindspeed.attention.layout import Layout, Ranges, union
from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Move, Plan, Stage, work_on
from mindspeed.errors import ConfigError


def mesh(mask: Mask, layout: Layout, queries: int) -> Plan:
    """Plan attention on a mesh of ranks.

    Only rows travel that are needed: keys that some query of the column sees, and queries that see
    some key of the row.

    Args:
        mask: Any.
        layout: Any; zigzag balances a causal mask.
        queries: Neighbouring ranks that share their queries, a; 1 for none.

    Raises:
        ConfigError: The number does not divide the ranks.
    """
    ranks = layout.ranks
    if queries < 1 or ranks % queries:
        raise ConfigError(f"mesh: {queries} ranks that share queries must divide {ranks} ranks")
    local = tuple(work_on(mask, own, own) for own in layout.segments)
    asks: list[Move] = []
    fetch: list[Move] = []
    work = []
    for rank, own in enumerate(layout.segments):
        column = range(rank - rank % queries, rank - rank % queries + queries)
        row = range(rank % queries, ranks, queries)
        seeing = _together(layout, column)
        keys = {src: _keys(mask, seeing, layout.segments[src]) for src in row if src != rank}
        seen = union([*own, *(part for parts in keys.values() for part in parts)])
        theirs = {src: _queries(mask, layout.segments[src], seen) for src in column if src != rank}
        fetch += [Move(src, rank, parts) for src, parts in keys.items() if parts]
        asks += [Move(src, rank, parts) for src, parts in theirs.items() if parts]
        asked = [part for parts in theirs.values() for part in parts]
        fetched = [part for parts in keys.values() for part in parts]
        regions = (
            *work_on(mask, own, fetched),
            *work_on(mask, asked, own),
            *work_on(mask, asked, fetched),
        )
        work.append(tuple(sorted(regions)))
    stages = [Stage((), local)]
    back = [Stage((), local)]
    if asks or fetch:
        home = tuple(Move(move.dst, move.src, move.ranges) for move in fetch)
        stages.append(Stage(tuple(fetch), tuple(work), (), 0, queries=tuple(asks)))
        back.append(Stage(tuple(fetch), tuple(work), home, 0, queries=tuple(asks)))
    name = f"mesh {queries} x {ranks // queries}"
    return Plan(name, mask, layout, tuple(stages), tuple(back))


def mesh_side(ranks: int, heads: int, groups: int) -> int:
    """How many ranks should share queries so that the fewest bytes travel.

    Args:
        ranks: Size of the group.
        heads: Query heads.
        groups: Key heads.
    """
    sides = [side for side in range(1, ranks + 1) if ranks % side == 0]
    # In units of half a row of one key head, forward and backward.
    return min(sides, key=lambda a: 5 * (a - 1) * heads + 6 * (ranks // a - 1) * groups)


def _together(layout: Layout, ranks: range) -> Ranges:
    return tuple(part for rank in ranks for part in layout.segments[rank])


def _keys(mask: Mask, queries: Ranges, keys: Ranges) -> Ranges:
    return union((part.k0, part.k1) for part in work_on(mask, queries, keys))


def _queries(mask: Mask, queries: Ranges, keys: Ranges) -> Ranges:
    return union((part.q0, part.q1) for part in work_on(mask, queries, keys))
