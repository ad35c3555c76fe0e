"""Layouts of other libraries' default planners, and the masks on which planners are compared.

A sharding is a list of ranges of the packed sequence for each rank.
"""

from __future__ import annotations

import heapq
import random
from itertools import accumulate, pairwise

from mindspeed.attention import Mask, SequenceSharding
from mindspeed.attention.plan import work_on
from mindspeed.attention.sequence_sharding import Range, length, union, without

K = 1024

VECTORS = {
    "V1": [65536],
    "V2": [32768, 8192, 8192, 4096, 4096, 2048, 2048, 1024, 1024, *[512] * 4],
    "V3": [16384] * 4,
    "V4": [40000, 9000, 7000, 4000, 2500, 1500, 800, 500, 180, 56],
}

# Lengths of documents in a pretraining corpus, published by MagiAttention: (from, to): documents.
LENGTHS = {
    (1, 10): 30254,
    (11, 50): 391188,
    (51, 100): 699596,
    (101, 200): 1377757,
    (201, 500): 3794735,
    (501, 1024): 3316785,
    (1025, 2048): 2106566,
    (2049, 4096): 988525,
    (4097, 8192): 410002,
    (8193, 16384): 173574,
    (16385, 32768): 115007,
    (32769, 65536): 18428,
    (65537, 131072): 22513,
    (131073, 196608): 18284,
}


def pretraining(size: int, seed: int, cap: int | None = None) -> list[int]:
    """Lengths of random documents that fill a sequence."""
    draw, lengths, left = random.Random(seed), [], size
    while left:
        low, high = draw.choices(list(LENGTHS), list(LENGTHS.values()))[0]
        length_ = draw.randint(low, high)
        lengths.append(min(length_, cap or length_, left))
        left -= lengths[-1]
    return lengths


def mask_of(lengths: list[int]) -> Mask:
    """Causal documents."""
    return Mask.documents((0, *accumulate(lengths)))


def areas(mask: Mask, parts: list[Range]) -> list[int]:
    """Pairs of each part."""
    everything = ((0, mask.size),)
    return [sum(region.area() for region in work_on(mask, (part,), everything)) for part in parts]


def min_heap(mask: Mask, ranks: int, chunk: int) -> SequenceSharding:
    """MagiAttention's default: the heaviest chunk next, to the rank with the least work."""
    chunks = [(a, a + chunk) for a in range(0, mask.size, chunk)]
    heap, own = [(0, rank) for rank in range(ranks)], [[] for _ in range(ranks)]
    for area, part in sorted(zip(areas(mask, chunks), chunks, strict=True), key=lambda x: -x[0]):
        load, rank = heapq.heappop(heap)
        own[rank].append(part)
        if len(own[rank]) * ranks < len(chunks):
            heapq.heappush(heap, (load + area, rank))
    return SequenceSharding(tuple(union(parts) for parts in own))


def ptrr(mask: Mask, ranks: int, block: int = 128) -> SequenceSharding:
    """torch's processing-time round robin: blocks by descending number of blocks of keys."""
    blocks = [(a, a + block) for a in range(0, mask.size, block)]
    visible = [work_on(mask, (own,), ((0, mask.size),)) for own in blocks]
    seen = [-(-parts[-1].k1 // block) - parts[0].k0 // block for parts in visible]
    order = sorted(range(len(blocks)), key=lambda number: -seen[number])
    own: list[list[Range]] = [[] for _ in range(ranks)]
    for place, number in enumerate(order):
        turn, rank = divmod(place, ranks)
        own[rank if turn % 2 == 0 else ranks - 1 - rank].append(blocks[number])
    return SequenceSharding(tuple(union(parts) for parts in own))


def per_document(lengths: list[int], ranks: int) -> SequenceSharding:
    """Transformer Engine's: every document in zigzag (here without its padding)."""
    own: list[list[Range]] = [[] for _ in range(ranks)]
    start = 0
    for size in lengths:
        cuts = [start + size * chunk // (2 * ranks) for chunk in range(2 * ranks + 1)]
        for chunk, part in enumerate(pairwise(cuts)):
            own[min(chunk, 2 * ranks - 1 - chunk)].append(part)
        start += size
    return SequenceSharding(tuple(union(parts) for parts in own))


def measures(mask: Mask, sharding: SequenceSharding) -> tuple[float, float, float]:
    """Balance; worst and mean rows received, as parts of what a ring receives."""
    ranks, everything = sharding.ranks, ((0, mask.size),)
    work = [sum(areas(mask, list(own))) for own in sharding.segments]
    rows = []
    for own in sharding.segments:
        seen = union((part.k0, part.k1) for part in work_on(mask, own, everything))
        rows.append(length(without(seen, own)))
    ring = mask.size - mask.size // ranks
    return sum(work) / ranks / max(work), max(rows) / ring, sum(rows) / ranks / ring
