"""Simulates the caching allocator of torch.cuda and torch_npu: which bytes a trace reserves.

An allocator reserves segments from the driver, divides them into blocks and keeps freed blocks for
later requests. What is reserved and not in use is fragmentation.

    request            rounded up to 512 B; the smallest free block of its pool that is large enough
    no such block      a new segment: 2 MiB for at most 1 MiB, 20 MiB below 10 MiB, else the request
                       rounded up to 2 MiB; with expandable segments the pool's only segment grows
    split              the rest of a block becomes a free block: from 512 B (requests of at most
                       1 MiB, expandable segments), else above 1 MiB
    free               the block is merged with its free neighbours

It is a simulation: streams, the garbage collector and ``max_split_size_mb`` are left out, and the
driver's own granularity is 2 MiB.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

_ROUNDING = 512
_MIB = 2**20
_SMALL = _MIB  # requests up to this size have a pool of their own
_GRANULARITY = 2 * _MIB
_SLAB, _LARGE = 20 * _MIB, 10 * _MIB


class AllocatorEvent(NamedTuple):
    """The beginning of an allocation of ``nbytes`` or, with 0, its end."""

    allocation: int
    nbytes: int
    long_lived: bool = False


@dataclass(frozen=True)
class AllocatorPolicy:
    """Options of the allocator.

    Attributes:
        expandable: ``expandable_segments:True``: one segment per pool that grows.
        pools: long-lived allocations have segments of their own.
    """

    expandable: bool = False
    pools: bool = False


@dataclass(frozen=True)
class Peaks:
    """Largest bytes in use (rounded requests) and reserved."""

    allocated: int
    reserved: int

    @property
    def fragmentation(self) -> float:
        """Part of the reserved bytes that is never in use at once."""
        return 1 - self.allocated / self.reserved if self.reserved else 0.0


@dataclass
class _Block:
    """Part of a segment; blocks of a segment are linked in the order of their addresses."""

    segment: int
    offset: int
    size: int
    before: _Block | None = None
    after: _Block | None = None
    free: bool = True


@dataclass
class _Pool:
    """Free blocks, smallest first, then by address; and the last block of the last segment."""

    small: bool
    free: list[tuple[int, int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], _Block] = field(default_factory=dict)
    end: _Block | None = None


class CachingAllocator:
    """Replays allocations under one policy."""

    def __init__(self, policy: AllocatorPolicy) -> None:
        self.policy = policy
        self._pools: dict[Hashable, _Pool] = {}
        self._live: dict[int, tuple[_Pool, _Block]] = {}
        self._segments = self._allocated = self._reserved = 0
        self._peak_allocated = self._peak_reserved = 0

    def replay(self, events: Iterable[AllocatorEvent]) -> Peaks:
        """The peaks after ``events``; frees of unknown allocations are ignored."""
        for event in events:
            if event.nbytes:
                self._allocate(event)
            elif event.allocation in self._live:
                self._release(*self._live.pop(event.allocation))
        return Peaks(self._peak_allocated, self._peak_reserved)

    def _allocate(self, event: AllocatorEvent) -> None:
        size = _rounded(event.nbytes, _ROUNDING)
        small, separate = size <= _SMALL, self.policy.pools and event.long_lived
        pool = self._pools.setdefault((small, separate), _Pool(small))
        place = bisect.bisect_left(pool.free, (size, 0, 0))
        if place < len(pool.free):
            _, segment, offset = pool.free[place]
            block = pool.blocks[segment, offset]
        else:
            block = self._new_block(pool, size)
        self._take_free(pool, block)
        if self._splits(pool, block.size - size):
            self._split(pool, block, size)
        self._live[event.allocation] = pool, block
        self._allocated += block.size
        self._peak_allocated = max(self._peak_allocated, self._allocated)

    def _new_block(self, pool: _Pool, size: int) -> _Block:
        """A free block of at least ``size`` in a new segment or at the end of the growing one."""
        last = pool.end if self.policy.expandable else None
        if last is None:
            size = self._segment_size(pool, size)
            self._segments += 1
            block = _Block(self._segments, 0, size)
        elif last.free:
            self._take_free(pool, last)
            size = _rounded(size - last.size, _GRANULARITY if pool.small else _SLAB)
            last.size += size
            block = last
        else:
            size = _rounded(size, _GRANULARITY if pool.small else _SLAB)
            block = _Block(last.segment, last.offset + last.size, size, before=last)
            last.after = block
        self._reserved += size
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        pool.end = block
        self._add_free(pool, block)
        return block

    def _segment_size(self, pool: _Pool, size: int) -> int:
        if pool.small:
            return _GRANULARITY
        if self.policy.expandable:
            return _rounded(size, _SLAB)
        return _SLAB if size < _LARGE else _rounded(size, _GRANULARITY)

    def _splits(self, pool: _Pool, rest: int) -> bool:
        if pool.small or self.policy.expandable:
            return rest >= _ROUNDING
        return rest > _SMALL

    def _split(self, pool: _Pool, block: _Block, size: int) -> None:
        rest = _Block(
            block.segment, block.offset + size, block.size - size, before=block, after=block.after
        )
        if block.after is not None:
            block.after.before = rest
        if pool.end is block:
            pool.end = rest
        block.after, block.size = rest, size
        self._add_free(pool, rest)

    def _release(self, pool: _Pool, block: _Block) -> None:
        self._allocated -= block.size
        for other in (block.after, block.before):
            if other is not None and other.free:
                self._take_free(pool, other)
                first, second = (block, other) if other is block.after else (other, block)
                block = self._merge(pool, first, second)
        self._add_free(pool, block)

    def _merge(self, pool: _Pool, first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if pool.end is second:
            pool.end = first
        return first

    def _add_free(self, pool: _Pool, block: _Block) -> None:
        block.free = True
        bisect.insort(pool.free, (block.size, block.segment, block.offset))
        pool.blocks[block.segment, block.offset] = block

    def _take_free(self, pool: _Pool, block: _Block) -> None:
        entry = (block.size, block.segment, block.offset)
        del pool.free[bisect.bisect_left(pool.free, entry)]
        del pool.blocks[block.segment, block.offset]
        block.free = False


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
