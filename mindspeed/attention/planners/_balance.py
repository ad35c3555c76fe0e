"""Balance a sharding by swaps: the busiest rank trades heavy tokens for as many light ones.

For every pair of a segment of the busiest rank and one of the idlest ranks, the heavy end of the
first is swapped with the light end of the second, for as many tokens as bring one of the two ranks
to the mean work. The best pair moves the most work per key that the two ranks receive in addition;
a key received by the worst rank counts once for every rank. The number of tokens of a rank never
changes. Keys are counted in blocks of about a thousandth of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed.attention.planners._workload import Ints, Segments, Workload

_LIMIT = 400
"""Most swaps."""
_PER_SWAP = 32
"""Cost of a swap in keys, besides those received: two more regions to compute."""
_BLOCKS = 1024


def balance(
    work: Workload,
    segments: Segments,
    ranks: int,
    granularity: int,
    target: tuple[int, int],
    partners: int,
    bound: int | None = None,
) -> Segments | None:
    """Swap until the mean work is a fraction of the largest, or no swap helps.

    Args:
        work: The mask.
        segments: Of all ranks; the number of tokens of each stays.
        ranks: Size of the group.
        granularity: Swap multiples of this many tokens, where there are as many.
        target: The wanted balance, as numerator and denominator.
        partners: Number of idlest ranks tried for each swap.
        bound: Stop when the cost (:func:`cost`) exceeds this; None for no bound.

    Returns:
        The balanced segments; None if the cost exceeded the bound.
    """
    swaps = _Swaps(work, segments, ranks, granularity)
    total = int(swaps.load.sum())
    for _ in range(_LIMIT):
        if bound is not None and cost(swaps.received) > bound:
            return None
        busiest = int(swaps.load.argmax())
        if total * target[1] >= int(swaps.load[busiest]) * ranks * target[0]:
            break
        if not swaps.swap(busiest, total // ranks, partners):
            break
    return swaps.segments()


def cost(received: Ints) -> int:
    """Cost of a sharding: (worst + mean) number of keys received, times the number of ranks."""
    return len(received) * int(received.max()) + int(received.sum())


@dataclass
class _Own:
    """Segments of a rank, and the number of key blocks before each block that it sees or owns."""

    start: Ints
    end: Ints
    covered: Ints


class _Ends:
    """The heavy or the light ends of the segments of some ranks."""

    def __init__(self, work: Workload, own: dict[int, _Own], heavy: bool) -> None:
        self.work = work
        self.rank = np.repeat(list(own), [len(one.start) for one in own.values()])
        self.start = np.concatenate([one.start for one in own.values()])
        self.end = np.concatenate([one.end for one in own.values()])
        self.piece = work.piece(self.start)
        slope = work.slope[self.piece]
        self.steepness = np.abs(slope)
        self.at_end = (slope >= 0) == heavy
        query = np.where(self.at_end, self.end - 1, self.start) - work.bound[self.piece]
        self.keys = work.keys[self.piece] + slope * query  # seen by the outermost query

    def first(self, number: Ints, tokens: Ints) -> Ints:
        """First of the ``tokens`` at that end of segments."""
        return np.where(self.at_end[number], self.end[number] - tokens, self.start[number])

    def seen(self, number: Ints, tokens: Ints) -> tuple[Ints, Ints]:
        """First and end of the keys that these tokens see."""
        first = self.first(number, tokens)
        return self.work.hull(first, first + tokens, self.piece[number])


class _Swaps:
    def __init__(self, work: Workload, segments: Segments, ranks: int, granularity: int) -> None:
        self.work, self.granularity = work, granularity
        self.block = max(work.size // _BLOCKS, 1)
        self.load = work.areas(segments, ranks)
        self.received = np.zeros(ranks, np.int64)
        self.own: list[_Own] = [_Own(segments.start[:0], segments.end[:0], self.load)] * ranks
        for rank in range(ranks):
            mine = segments.rank == rank
            self.set_segments(rank, segments.start[mine], segments.end[mine])

    def segments(self) -> Segments:
        return Segments(
            np.repeat(np.arange(len(self.own)), [len(own.start) for own in self.own]),
            np.concatenate([own.start for own in self.own]),
            np.concatenate([own.end for own in self.own]),
        )

    def set_segments(self, rank: int, start: Ints, end: Ints) -> None:
        """Set the segments of a rank; those that touch within a piece become one."""
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        piece = self.work.piece(start)
        apart = np.ones(len(start) + 1, bool)
        apart[1:-1] = (start[1:] != end[:-1]) | (piece[1:] != piece[:-1])
        start, end = start[apart[:-1]], end[apart[1:]]
        low, high = self.work.hull(start, end, self.work.piece(start))
        change = np.zeros(-(-self.work.size // self.block) + 1, np.int64)
        np.add.at(change, np.concatenate((low, start)) // self.block, 1)
        np.add.at(change, -(-np.concatenate((high, end)) // self.block), -1)
        covered = np.concatenate(([0], np.cumsum(np.cumsum(change[:-1]) > 0)))
        self.own[rank] = _Own(start, end, covered)
        self.received[rank] = covered[-1] * self.block - (end - start).sum()

    def missing(self, rank: int, low: Ints, high: Ints) -> Ints:
        """Approximate number of these keys that a rank neither sees nor owns."""
        first, last = low // self.block, -(-high // self.block)
        covered = self.own[rank].covered
        return (last - first - covered[last] + covered[first]) * self.block

    def swap(self, busiest: int, mean: int, partners: int) -> bool:
        """Make the best swap of the busiest rank; False if none helps."""
        idlest = self.load.argsort(kind="stable")[:partners].tolist()
        others = [rank for rank in idlest if self.load[rank] < mean]
        if not others or self.load[busiest] <= mean:
            return False
        mine = _Ends(self.work, {busiest: self.own[busiest]}, heavy=True)
        theirs = _Ends(self.work, {rank: self.own[rank] for rank in others}, heavy=False)
        wanted = np.minimum(self.load[busiest] - mean, mean - self.load[theirs.rank])

        gap = mine.keys[:, None] - theirs.keys
        one, other = np.nonzero(gap > 0)
        gap = gap[one, other]
        steepness = mine.steepness[one] + theirs.steepness[other]
        tokens = np.minimum((mine.end - mine.start)[one], (theirs.end - theirs.start)[other])
        # Up to the last token that is heavier than the one it is swapped with.
        worth = np.where(steepness > 0, (gap - 1) // np.maximum(steepness, 1) + 1, tokens)
        tokens = np.minimum(np.minimum(tokens, worth), _enough(gap, steepness, wanted[other]))
        rounded = tokens // self.granularity * self.granularity
        tokens = np.where(rounded > 0, rounded, tokens)
        gain = tokens * gap - steepness * (tokens * (tokens - 1) // 2)
        # The other rank must not become as busy as this one was.
        gain[gain >= self.load[busiest] - self.load[theirs.rank[other]]] = 0
        if not gain.any():
            return False

        more_of_mine = self.missing(busiest, *theirs.seen(other, tokens))
        more_of_theirs = np.zeros_like(gain)
        low, high = mine.seen(one, tokens)
        for rank in others:
            at = theirs.rank[other] == rank
            more_of_theirs[at] = self.missing(rank, low[at], high[at])
        worst = np.maximum(
            self.received[busiest] + more_of_mine,
            self.received[theirs.rank[other]] + more_of_theirs,
        )
        worse = np.maximum(worst - self.received.max(), 0)
        price = _PER_SWAP + more_of_mine + more_of_theirs + len(self.own) * worse
        best = np.array([(gain / price).argmax()])
        number = int(best[0])
        rank = int(theirs.rank[other[number]])
        self.exchange(
            (busiest, int(mine.first(one[best], tokens[best])[0])),
            (rank, int(theirs.first(other[best], tokens[best])[0])),
            int(tokens[number]),
        )
        self.load[busiest] -= gain[number]
        self.load[rank] += gain[number]
        return True

    def exchange(self, one: tuple[int, int], other: tuple[int, int], tokens: int) -> None:
        """Swap ``tokens`` tokens of two ranks, given as (rank, first token)."""
        left = [_without(self.own[rank], first, first + tokens) for rank, first in (one, other)]
        for (rank, _), (start, end), (_, first) in zip(
            (one, other), left, (other, one), strict=True
        ):
            self.set_segments(rank, np.append(start, first), np.append(end, first + tokens))


def _without(own: _Own, first: int, last: int) -> tuple[Ints, Ints]:
    """Start and end of the segments without ``[first, last)``, an end of one of them."""
    start = np.where(own.start == first, last, own.start)
    end = np.where((own.end == last) & (own.start != first), first, own.end)
    return start[start < end], end[start < end]


def _enough(gap: Ints, steepness: Ints, wanted: Ints) -> Ints:
    """About the fewest tokens x with ``x gap - steepness x (x - 1) / 2 >= wanted``."""
    sum_ = 2 * gap + steepness
    # IEEE square roots are correctly rounded, so all machines get the same number.
    root = np.sqrt(np.maximum(sum_ * sum_ - 8 * steepness * wanted, 0).astype(np.float64))
    curved = -(-(sum_ - root.astype(np.int64)) // np.maximum(2 * steepness, 1))
    return np.maximum(np.where(steepness > 0, curved, -(-wanted // gap)), 1)
