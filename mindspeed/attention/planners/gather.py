"""Keys and values directly from their owners: all of them, or only those that are attended to.

``all_gather`` is ``--cp-comm-type all_gather``: every rank receives everything, in one stage.
``needed_only`` sends a row only to ranks with a query that attends to it (causal and zigzag: three
quarters of the rows; packed documents and windows: far fewer), in a few stages of about equal size,
so that the rows of the next stage are sent during the work of this one.

Gradients are sent directly to the owner, which adds them in fp32: each is rounded once, where a
gradient in a ring is rounded at every rank.
"""

from __future__ import annotations

from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Plan, Stage, Transfer, work_on
from mindspeed.attention.sequence_sharding import Ranges, SequenceSharding, length, union, without


def all_gather(mask: Mask, sharding: SequenceSharding) -> Plan:
    """Plan attention in which every rank receives all keys and values at once."""
    wanted: list[Ranges] = [((0, mask.size),)] * sharding.ranks
    return _plan("all-gather", mask, sharding, [_moves(sharding, wanted)])


def needed_only(mask: Mask, sharding: SequenceSharding, steps: int = 2) -> Plan:
    """Plan attention whose ranks receive the needed keys and values only, in ``steps`` stages."""
    wanted = [seen(mask, own) for own in sharding.segments]
    groups: list[list[Transfer]] = [[] for _ in range(steps)]
    for rank in range(sharding.ranks):
        arriving = _moves(sharding, wanted, rank)
        total, taken = sum(length(move.ranges) for move in arriving), 0
        for move in arriving:
            groups[taken * steps // max(total, 1)].append(move)
            taken += length(move.ranges)
    return _plan("needed only", mask, sharding, [group for group in groups if group])


def seen(mask: Mask, queries: Ranges) -> Ranges:
    """The keys that any of these queries sees, of each region from the first to the last."""
    return union((part.k0, part.k1) for part in work_on(mask, queries, ((0, mask.size),)))


def _moves(
    sharding: SequenceSharding, wanted: list[Ranges], rank: int | None = None
) -> list[Transfer]:
    """Wanted rows that ranks (or one ``rank``) do not own, nearest sources first."""
    moves: list[Transfer] = []
    for dst in range(sharding.ranks) if rank is None else (rank,):
        parts = sharding.owned(without(wanted[dst], sharding.segments[dst]))
        for src in sorted(parts, key=lambda src: (dst - src) % sharding.ranks):
            moves.append(Transfer(src, dst, tuple(parts[src])))
    return moves


def _plan(
    algorithm: str, mask: Mask, sharding: SequenceSharding, groups: list[list[Transfer]]
) -> Plan:
    local = tuple(work_on(mask, own, own) for own in sharding.segments)
    forward, backward = [Stage((), local)], [Stage((), local)]
    for group in groups:
        keys: list[list[tuple[int, int]]] = [[] for _ in range(sharding.ranks)]
        for move in group:
            keys[move.dst] += move.ranges
        pairs = zip(sharding.segments, keys, strict=True)
        work = tuple(work_on(mask, own, arrived) for own, arrived in pairs)
        back = tuple(Transfer(move.dst, move.src, move.ranges) for move in group)
        posted = len(forward) - 1
        forward.append(Stage(tuple(group), work, (), posted))
        backward.append(Stage(tuple(group), work, back, posted))
    return Plan(algorithm, mask, sharding, tuple(forward), tuple(backward))
