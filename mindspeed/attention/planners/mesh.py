"""Mesh attention: queries are sent along the columns of a mesh of ranks, keys along its rows.

Ranks form a mesh of a x b. Rank (x, y) receives the queries of the a ranks of its column x and the
keys and values of the b ranks of its row y, and computes their tile. Partial outputs are sent back
along the column with their log-sum-exp. In units of a rank's own rows, with g query heads per key
head, forward and backward together:

    a rank receives   (a - 1) 5 Q + (b - 1) 3 KV,   Q = g KV / 2

which for many ranks and few query heads per key head is far less than the 3 (P - 1) KV of a
ring, a mesh of 1 x P: at P = 64 and g = 1 a fifth. With the zigzag sharding every tile of a causal
mask has the same work.

In the backward pass queries are sent with the gradient of their output and two statistics per head,
the log-sum-exp and delta = sum(dout * out); the output itself is not needed.

Source: Chen et al., "Mesh-Attention" (2025).
"""

from __future__ import annotations

from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Plan, Stage, Transfer, work_on
from mindspeed.attention.sequence_sharding import Ranges, SequenceSharding, union
from mindspeed.errors import ConfigError


def mesh(mask: Mask, sharding: SequenceSharding, queries: int) -> Plan:
    """Plan attention on a mesh of ranks.

    Only needed rows are sent: keys that some query of the column sees, and queries that see some
    key of the row.

    Args:
        mask: Any.
        sharding: Any; zigzag balances a causal mask.
        queries: Number of neighbouring ranks that share their queries, a.

    Raises:
        ConfigError: The number does not divide the ranks.
    """
    ranks = sharding.ranks
    if queries < 1 or ranks % queries:
        raise ConfigError(f"mesh: {queries} ranks that share queries must divide {ranks} ranks")
    local = tuple(work_on(mask, own, own) for own in sharding.segments)
    q: list[Transfer] = []
    kv: list[Transfer] = []
    work = []
    for rank, own in enumerate(sharding.segments):
        column = range(rank - rank % queries, rank - rank % queries + queries)
        row = range(rank % queries, ranks, queries)
        column_queries = tuple(part for rank in column for part in sharding.segments[rank])
        kv_from = {
            src: _keys(mask, column_queries, sharding.segments[src]) for src in row if src != rank
        }
        seen = union([*own, *(part for parts in kv_from.values() for part in parts)])
        q_from = {
            src: _queries(mask, sharding.segments[src], seen) for src in column if src != rank
        }
        kv += [Transfer(src, rank, parts) for src, parts in kv_from.items() if parts]
        q += [Transfer(src, rank, parts) for src, parts in q_from.items() if parts]
        received_q = [part for parts in q_from.values() for part in parts]
        received_kv = [part for parts in kv_from.values() for part in parts]
        regions = (
            *work_on(mask, own, received_kv),
            *work_on(mask, received_q, own),
            *work_on(mask, received_q, received_kv),
        )
        work.append(tuple(sorted(regions)))
    stages = [Stage((), local)]
    back = [Stage((), local)]
    if q or kv:
        dkv = tuple(Transfer(transfer.dst, transfer.src, transfer.ranges) for transfer in kv)
        stages.append(Stage(tuple(kv), tuple(work), (), 0, q=tuple(q)))
        back.append(Stage(tuple(kv), tuple(work), dkv, 0, q=tuple(q)))
    name = f"mesh {queries} x {ranks // queries}"
    return Plan(name, mask, sharding, tuple(stages), tuple(back))


def mesh_side(ranks: int, heads: int, groups: int) -> int:
    """The number of ranks that share queries for which the fewest bytes are sent."""
    sides = [side for side in range(1, ranks + 1) if ranks % side == 0]
    # In units of half a row of one key head, forward plus backward.
    return min(sides, key=lambda a: 5 * (a - 1) * heads + 6 * (ranks // a - 1) * groups)


def _keys(mask: Mask, queries: Ranges, keys: Ranges) -> Ranges:
    return union((part.k0, part.k1) for part in work_on(mask, queries, keys))


def _queries(mask: Mask, queries: Ranges, keys: Ranges) -> Ranges:
    return union((part.q0, part.q1) for part in work_on(mask, queries, keys))
