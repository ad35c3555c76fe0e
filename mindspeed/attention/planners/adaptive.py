"""Adaptive context parallelism: the layout that moves the least rows, among those with equal work.

Several layouts are tried on the mask; of those with a balance of at least .99, the one whose worst
and mean ranks receive the fewest rows is taken, and keys and values then go straight to the ranks
that see them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from mindspeed.attention.layout import Layout, Range, contiguous, length, union, without
from mindspeed.attention.mask import Mask
from mindspeed.attention.plan import Plan, work_on
from mindspeed.attention.planners.gather import needed_only, seen


def adaptive(mask: Mask, ranks: int, granularity: int = 128, overlap: int = 2) -> Plan:
    """Plan the attention of a mask with the layout that suits it.

    Args:
        mask: Any.
        ranks: Size of the group.
        granularity: As in :func:`adaptive_layout`.
        overlap: In how many steps keys and values arrive.
    """
    return needed_only(mask, adaptive_layout(mask, ranks, granularity), overlap)


def adaptive_layout(mask: Mask, ranks: int, granularity: int = 128) -> Layout:
    """Give every rank as many tokens, about as much work, and few keys of others to look at.

    Args:
        mask: Any.
        ranks: Size of the group.
        granularity: Smallest number of tokens that is moved for the sake of balance.
    """
    best = None
    for layout in _candidates(mask, ranks, granularity):
        areas = [sum(r.area() for r in work_on(mask, own, ((0, mask.size),)))
                 for own in layout.segments]  # fmt: skip
        rows = [length(without(seen(mask, own), own)) for own in layout.segments]
        balanced = 100 * sum(areas) >= 99 * ranks * max(areas)
        cost = (not balanced, 0 if balanced else max(areas), ranks * max(rows) + sum(rows))
        if best is None or cost < best[0]:
            best = cost, layout
    assert best is not None
    return best[1]


def _candidates(mask: Mask, ranks: int, granularity: int) -> Iterator[Layout]:
    yield contiguous(mask.size, ranks)
    cuts = [mask.size * chunk // (2 * ranks) for chunk in range(2 * ranks + 1)]
    if mask.size % (2 * ranks) == 0:
        yield _layout(
            [(cuts[j], cuts[j + 1]) for j in (r, 2 * ranks - 1 - r)] for r in range(ranks)
        )
    chunk = 16 * granularity
    while chunk and mask.size % (chunk * ranks):
        chunk //= 2
    if chunk:
        yield _min_heap(mask, ranks, chunk)


def _min_heap(mask: Mask, ranks: int, chunk: int) -> Layout:
    chunks = [(a, a + chunk) for a in range(0, mask.size, chunk)]
    work = [sum(r.area() for r in work_on(mask, (own,), ((0, mask.size),))) for own in chunks]
    own: list[list[Range]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for area, part in sorted(zip(work, chunks, strict=True), key=lambda pair: -pair[0]):
        load, rank = heapq.heappop(heap)
        own[rank].append(part)
        if len(own[rank]) * chunk * ranks < mask.size:
            heapq.heappush(heap, (load + area, rank))
    return _layout(own)


def _layout(own: object) -> Layout:
    return Layout(tuple(union(ranges) for ranges in own))  # type: ignore[attr-defined]
