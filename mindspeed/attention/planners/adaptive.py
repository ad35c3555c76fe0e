"""Adaptive context parallelism: a sharding chosen for the mask, keys and values only where needed.

Under documents of different lengths, prefixes and windows, equal parts of a sequence have very
unequal work. Sharding evenly makes all ranks wait for the busiest one (zigzag on packed documents:
a third of the ideal speed); sharding finely sends everything everywhere. Here several initial
shardings are balanced by swaps (:mod:`._balance`). Of those with a balance of at least .995 (mean
over largest work), the one is chosen for which the worst rank and the mean receive the fewest keys.
Keys and values are then sent directly to the ranks that need them.

Initial shardings are cheap to make, and each is the best for some masks:

contiguous   windows and bidirectional masks: the fewest keys are sent
zigzag       one long causal document
min-heap     chunks of equal length, the heaviest first, each to the rank with the least work
few ranks    whole documents; a long one on the fewest ranks that can do its work

All ranks have equal numbers of tokens and should have equal work. A long document is *dense*: its
queries see more keys than the mean. A rank whose share of work comes from a dense document fills
its remaining tokens with light documents; the lighter these are, the fewer ranks the dense document
needs. *Few ranks* therefore pairs the densest document with the lightest ones, and so on.

Everything is computed from the mask in integers, so all ranks choose the same sharding.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence

from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Plan
from mindspeed.attention.planners._balance import balance, cost
from mindspeed.attention.planners._workload import Document, Segments, Workload
from mindspeed.attention.planners.gather import needed_only
from mindspeed.attention.sequence_sharding import Range, SequenceSharding

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


Parts = list[list[Range]]
Shares = list[tuple[int, int]]

SLACK = (0, 20, 50)
"""Allowed overload of a rank, in thousandths of the mean; more means fewer ranks per document."""
_CHUNKS = 4096
"""Most chunks of the min-heap; with more, nearly all keys are sent to all ranks."""
_EVEN = (105, 100)
"""Contiguous parts of a document are used if none is denser than it by more than this factor."""


def initial_shardings(work: Workload, ranks: int, granularity: int) -> Iterator[Parts]:
    """Yield the initial shardings."""
    quota = quotas(work.size, ranks)
    yield in_order(quota)
    yield zigzag(quota)
    chunk = 16 * granularity
    while chunk > granularity and work.size % (chunk * ranks):
        chunk //= 2
    if work.size % (chunk * ranks) == 0 and work.size <= chunk * _CHUNKS:
        yield min_heap(work, ranks, chunk)
    for slack in SLACK:
        yield few_ranks(work, quota, slack)


def quotas(size: int, ranks: int) -> list[int]:
    """Tokens of each rank; they differ by at most one."""
    return [size * (rank + 1) // ranks - size * rank // ranks for rank in range(ranks)]


def in_order(tokens: Sequence[int]) -> Parts:
    """Contiguous parts, in order."""
    bounds = [0, *itertools.accumulate(tokens)]
    return [[part] for part in itertools.pairwise(bounds)]


def zigzag(tokens: Sequence[int]) -> Parts:
    """Parts of two chunks, one from each end; the last part is the middle.

    Under a causal mask the work of a part is its number of tokens times half the length.
    """
    heads, tails = [n // 2 for n in tokens], [n - n // 2 for n in tokens]
    bounds = [0, *itertools.accumulate(heads + tails[::-1])]
    chunks = list(itertools.pairwise(bounds))
    return [[chunks[i], chunks[-1 - i]] for i in range(len(tokens))]


def min_heap(work: Workload, ranks: int, chunk: int) -> Parts:
    """Chunks by descending work, each to the rank with the least work that has room for it.

    Source: the default dispatch of MagiAttention (Zewei and Yunpeng, 2025).
    """
    bounds = range(0, work.size + 1, chunk)
    chunks = work.documents_between(bounds)
    own: Parts = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for part in sorted(chunks, key=lambda part: -part.pairs):
        load, rank = heapq.heappop(heap)
        own[rank].append((part.start, part.end))
        if len(own[rank]) * ranks < len(chunks):
            heapq.heappush(heap, (load + part.pairs, rank))
    return own


def few_ranks(work: Workload, quota: Sequence[int], slack: int) -> Parts:
    """Documents by descending work, each on the fewest ranks that can compute it.

    Args:
        work: The mask.
        quota: Tokens of each rank.
        slack: Allowed work of a rank above the mean, in thousandths of the mean.
    """
    own: Parts = [[] for _ in quota]
    total = int(work.area[-1])
    room = [total * (1000 + slack) // (1000 * len(quota))] * len(quota)
    free = list(quota)
    documents = sorted(work.documents, key=lambda document: (-document.pairs, document.start))
    filling = _Filling(documents, total, work.size, slack)
    for document in documents:
        if filling.is_dense(document):
            shares = _of_dense(document, room, free, *filling.take(document))
        else:
            shares = _of_light(document.tokens, room, free)
        for rank, part in _split(work, document, shares):
            own[rank].append(part)
            free[rank] -= part[1] - part[0]
            room[rank] -= document.pairs if len(shares) == 1 else work.pairs(*part)
    return own


class _Filling:
    """The light documents that fill up ranks, the lightest first."""

    def __init__(self, documents: list[Document], total: int, size: int, slack: int) -> None:
        self.total, self.size = total, size
        self.pairs, self.tokens = total * (1000 + slack), size * 1000  # a full rank's density
        light = [(d.pairs, d.tokens) for d in documents if not self.is_dense(d)]
        self.left = sorted(light, key=lambda one: one[0] / one[1], reverse=True)

    def is_dense(self, document: Document) -> bool:
        """Whether its queries see more keys than the mean."""
        return document.pairs * self.size > self.total * document.tokens

    def take(self, document: Document) -> tuple[int, int]:
        """Pairs and tokens to add to a dense document for the density of a full rank."""
        pairs, tokens = document.pairs, document.tokens
        while self.left and (lack := pairs * self.tokens - self.pairs * tokens) > 0:
            more, length = self.left.pop()
            each = self.pairs * length - more * self.tokens
            # After rounding, the remainder may be as dense as a full rank, which does not help.
            part = min(-(-lack * length // each), length) if each > 0 else length
            if part < length:
                self.left.append((more - more * part // length, length - part))
            pairs, tokens = pairs + more * part // length, tokens + part
        return pairs - document.pairs, max(tokens - document.tokens, 1)


def _of_dense(
    document: Document, room: list[int], free: list[int], pairs: int, tokens: int
) -> Shares:
    """Ranks and their tokens of a dense document, if filled up with ``pairs`` in ``tokens``."""
    each = max(document.pairs * tokens - pairs * document.tokens, 1)
    most = [
        min(max((r * tokens - pairs * f) * document.tokens // each, 0), f)
        for r, f in zip(room, free, strict=True)
    ]
    shares: dict[int, int] = {}
    left = document.tokens
    order = sorted(range(len(room)), key=lambda rank: (-most[rank], rank))
    while left and order and most[order[0]]:
        able = [rank for rank in order if most[rank] >= left]
        # The last of them has the least room to spare.
        rank = able[-1] if able else order[0]
        shares[rank] = min(most[rank], left)
        left -= shares[rank]
        order.remove(rank)
    for rank in sorted(range(len(room)), key=lambda rank: (-room[rank], rank)):
        if left and (more := min(free[rank] - shares.get(rank, 0), left)):
            shares[rank] = shares.get(rank, 0) + more
            left -= more
    return sorted(shares.items(), key=lambda share: (-share[1], share[0]))


def _of_light(tokens: int, room: list[int], free: list[int]) -> Shares:
    """The same for a light document: on the ranks with most work left per free token."""
    ranks = range(len(free))
    for count in range(1, len(free) + 1):
        share = -(-tokens // count)
        able = [rank for rank in ranks if free[rank] >= share]
        if len(able) >= count:
            able = heapq.nlargest(count, able, key=lambda rank: room[rank] / free[rank])
            return list(zip(able, quotas(tokens, count), strict=True))
    shares, left = [], tokens
    for rank in sorted(ranks, key=lambda rank: (-free[rank], rank)):
        if more := min(free[rank], left):
            shares.append((rank, more))
            left -= more
    return shares


def _split(work: Workload, document: Document, shares: Shares) -> Iterator[tuple[int, Range]]:
    """Split a document into parts of about its density."""
    if len(shares) == 1:
        yield shares[0][0], (document.start, document.end)
        return
    tokens = [share for _, share in shares]
    limit, percent = document.pairs * _EVEN[0], document.tokens * _EVEN[1]
    plain = in_order(tokens)
    even = all(
        work.pairs(document.start + a, document.start + b) * percent <= limit * (b - a)
        for ((a, b),) in plain
    )
    for (rank, _), parts in zip(shares, plain if even else zigzag(tokens), strict=True):
        yield from ((rank, (document.start + a, document.start + b)) for a, b in parts if a < b)
