"""Adaptive context parallelism: a layout made for the mask, keys and values only where needed.

Documents of different lengths, prefixes and windows give the parts of a sequence very different
work. Whoever cuts them evenly waits for the busiest rank (zigzag, packed: a third of the ideal
speed), and whoever cuts them finely sends everything everywhere. Several starting layouts
(:mod:`._starts`) are balanced by swaps (:mod:`._swaps`); of those whose mean work is at least .995
of the largest, the one is taken whose worst and mean ranks receive the fewest keys. Keys and values
then go straight to the ranks that see them.

Everything is computed from the mask in integers: all ranks find the same layout.
"""

from __future__ import annotations

import functools

from mindspeed.attention.layout import Layout
from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Plan
from mindspeed.attention.planners._starts import starts
from mindspeed.attention.planners._swaps import balance, cost
from mindspeed.attention.planners._workload import Segments, Workload
from mindspeed.attention.planners.gather import needed_only

_BALANCE = (995, 1000)
_TRIED = 4
"""How many starts are balanced by swaps, those with the least of it to do ..."""
_FEW_PIECES = 64
"""... where there are more documents than this; otherwise all are, in two ways."""
_TOLERABLE = 90
"""Percent of balance that a layout must have that moves less than a third of the keys."""
_PAIRS_PER_KEY = 1024
"""Pairs that are computed while a key and value travel, about (400 TFLOP/s, 50 GB/s, 8 heads)."""


def adaptive(mask: Mask, ranks: int, granularity: int = 128, overlap: int = 2) -> Plan:
    """Plan the attention of a mask with the layout that suits it.

    Args:
        mask: Any.
        ranks: Size of the group.
        granularity: As in :func:`adaptive_layout`.
        overlap: In how many steps keys and values arrive.
    """
    return needed_only(mask, adaptive_layout(mask, ranks, granularity), overlap)


@functools.lru_cache(maxsize=64)
def adaptive_layout(mask: Mask, ranks: int, granularity: int = 128) -> Layout:
    """Give every rank as many tokens, about as much work, and few keys of others to look at.

    Found once for equal arguments.

    Args:
        mask: Any.
        ranks: Size of the group.
        granularity: Tokens are moved for the sake of balance in multiples of this.
    """
    work = Workload(mask)
    least = int(work.area[-1]) * _BALANCE[1] // (ranks * _BALANCE[0])  # of a balanced busiest rank
    found = sorted(
        (_Priced(work, work.cut(own), ranks) for own in starts(work, ranks, granularity)),
        key=lambda one: (one.area, one.cost),
    )
    best = found[0]
    tries = [(2, start) for start in found[:_TRIED]]
    if len(work.keys) <= _FEW_PIECES:
        tries = [(partners, start) for partners in (2, 4) for start in found]
    for partners, start in tries:
        bound = best.cost if best.area <= least else None
        if bound is not None and start.cost >= bound:
            continue
        segments = balance(work, start.segments, ranks, granularity, _BALANCE, partners, bound)
        if segments is not None:
            best = min(best, _Priced(work, segments, ranks), key=lambda one: one.key(least))
    # A little more work for much less traffic: the first tokens under a sliding window see little.
    most = least * _BALANCE[0] * 100 // (_BALANCE[1] * _TOLERABLE)
    for start in found:
        saved = best.worst - start.worst
        cheap = start.area <= most and start.area - best.area < _PAIRS_PER_KEY * saved
        if cheap and 3 * saved >= 2 * best.worst:
            best = start
    return best.segments.layout(ranks)


class _Priced:
    """Segments, the pairs of the busiest rank, and the keys received."""

    def __init__(self, work: Workload, segments: Segments, ranks: int) -> None:
        self.segments = segments
        self.area = int(work.areas(segments, ranks).max())
        received = work.received(segments, ranks)
        self.worst, self.cost = int(received.max()), cost(received)

    def key(self, least: int) -> tuple[int, int, int]:
        """Balanced ones first, then by cost, then by the number of pieces."""
        return max(self.area, least), self.cost, len(self.segments.start)
