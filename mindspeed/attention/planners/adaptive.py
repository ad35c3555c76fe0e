"""Adaptive context parallelism: a sharding chosen for the mask, keys and values only where needed.

Under documents of different lengths, prefixes and windows, equal parts of a sequence have very
unequal work. Sharding evenly makes all ranks wait for the busiest one (zigzag on packed documents:
a third of the ideal speed); sharding finely sends everything everywhere. Here several initial
shardings (:mod:`._initial_shardings`) are balanced by swaps (:mod:`._balance`). Of those with a
balance of at least .995 (mean over largest work), the one is chosen for which the worst rank and
the mean receive the fewest keys. Keys and values are then sent directly to the ranks that need
them.

Everything is computed from the mask in integers, so all ranks choose the same sharding.
"""

from __future__ import annotations

import functools

from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Plan
from mindspeed.attention.planners._balance import balance, cost
from mindspeed.attention.planners._initial_shardings import initial_shardings
from mindspeed.attention.planners._workload import Segments, Workload
from mindspeed.attention.planners.gather import needed_only
from mindspeed.attention.sequence_sharding import SequenceSharding

_BALANCE = (995, 1000)
_TRIED = 4
"""Number of initial shardings that are balanced by swaps, those nearest to balance ..."""
_FEW_PIECES = 64
"""... if the workload has more pieces than this; otherwise all are, with 2 and 4 partners."""
_TOLERABLE = 90
"""Least balance, in percent, of a sharding preferred for sending a third of the keys."""
_PAIRS_PER_KEY = 1024
"""Pairs computed in the time that sends a key and value: 400 TFLOP/s, 50 GB/s, 8 heads."""


def adaptive(mask: Mask, ranks: int, granularity: int = 128, overlap: int = 2) -> Plan:
    """Plan attention with the sharding chosen for the mask; keys arrive in ``overlap`` stages."""
    return needed_only(mask, adaptive_sharding(mask, ranks, granularity), overlap)


@functools.lru_cache(maxsize=64)
def adaptive_sharding(mask: Mask, ranks: int, granularity: int = 128) -> SequenceSharding:
    """Shard for equal tokens, nearly equal work, and few keys received; cached by arguments.

    Swaps move multiples of ``granularity`` tokens.
    """
    work = Workload(mask)
    least = int(work.area[-1]) * _BALANCE[1] // (ranks * _BALANCE[0])  # of a balanced busiest rank
    found = sorted(
        (
            _Candidate(work, work.split(own), ranks)
            for own in initial_shardings(work, ranks, granularity)
        ),
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
            best = min(best, _Candidate(work, segments, ranks), key=lambda one: one.key(least))
    # Slightly less balance for much less communication: early queries of a window see little.
    most = least * _BALANCE[0] * 100 // (_BALANCE[1] * _TOLERABLE)
    for start in found:
        saved = best.worst - start.worst
        cheap = start.area <= most and start.area - best.area < _PAIRS_PER_KEY * saved
        if cheap and 3 * saved >= 2 * best.worst:
            best = start
    return best.segments.sharding(ranks)


class _Candidate:
    """A candidate: segments, pairs of the busiest rank, cost of the keys received."""

    def __init__(self, work: Workload, segments: Segments, ranks: int) -> None:
        self.segments = segments
        self.area = int(work.areas(segments, ranks).max())
        received = work.received(segments, ranks)
        self.worst, self.cost = int(received.max()), cost(received)

    def key(self, least: int) -> tuple[int, int, int]:
        """Sort key: balanced ones first, then by cost, then by number of segments."""
        return max(self.area, least), self.cost, len(self.segments.start)
