"""Keys and values straight from their owners: all of them, or only those that are seen.

``all_gather`` is what ``--cp-comm-type all_gather`` does: every rank gets everything, in one step.
``needed_only`` sends a row only to ranks with a query that sees it (causal and zigzag: three
quarters of the rows; packed documents and windows: far fewer), in a few steps of about equal size,
so that the next step's rows travel during the work on this one's.

Gradients go straight back to the owner, which adds them in fp32: one rounding each, where a
gradient that travels round a ring is rounded at every rank.
"""

from __future__ import annotations

from mindspeed.attention.layout import Layout, Ranges, length, union, without
from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Move, Plan, Stage, work_on


def all_gather(mask: Mask, layout: Layout) -> Plan:
    """Plan attention whose ranks get all keys and values at once.

    Args:
        mask: Any.
        layout: Any; zigzag balances a causal mask.
    """
    wanted: list[Ranges] = [((0, mask.size),)] * layout.ranks
    return _plan("all-gather", mask, layout, [_moves(layout, wanted)])


def needed_only(mask: Mask, layout: Layout, steps: int = 2) -> Plan:
    """Plan attention whose ranks get the keys and values that their queries see.

    Args:
        mask: Any.
        layout: Any.
        steps: In how many steps they arrive.
    """
    wanted = [seen(mask, own) for own in layout.segments]
    groups: list[list[Move]] = [[] for _ in range(steps)]
    for rank in range(layout.ranks):
        arriving = _moves(layout, wanted, rank)
        total, taken = sum(length(move.ranges) for move in arriving), 0
        for move in arriving:
            groups[taken * steps // max(total, 1)].append(move)
            taken += length(move.ranges)
    return _plan("needed only", mask, layout, [group for group in groups if group])


def seen(mask: Mask, queries: Ranges) -> Ranges:
    """The keys that some of these queries see (of a region: from its first to its last)."""
    return union((part.k0, part.k1) for part in work_on(mask, queries, ((0, mask.size),)))


def _moves(layout: Layout, wanted: list[Ranges], rank: int | None = None) -> list[Move]:
    """What ranks want and do not own, nearest sources first; ``rank`` for one of them."""
    moves: list[Move] = []
    for dst in range(layout.ranks) if rank is None else (rank,):
        parts = layout.owned(without(wanted[dst], layout.segments[dst]))
        for src in sorted(parts, key=lambda src: (dst - src) % layout.ranks):
            moves.append(Move(src, dst, tuple(parts[src])))
    return moves


def _plan(algorithm: str, mask: Mask, layout: Layout, groups: list[list[Move]]) -> Plan:
    local = tuple(work_on(mask, own, own) for own in layout.segments)
    forward, backward = [Stage((), local)], [Stage((), local)]
    for group in groups:
        keys: list[list[tuple[int, int]]] = [[] for _ in range(layout.ranks)]
        for move in group:
            keys[move.dst] += move.ranges
        pairs = zip(layout.segments, keys, strict=True)
        work = tuple(work_on(mask, own, arrived) for own, arrived in pairs)
        back = tuple(Move(move.dst, move.src, move.ranges) for move in group)
        posted = len(forward) - 1
        forward.append(Stage(tuple(group), work, (), posted))
        backward.append(Stage(tuple(group), work, back, posted))
    return Plan(algorithm, mask, layout, tuple(forward), tuple(backward))
