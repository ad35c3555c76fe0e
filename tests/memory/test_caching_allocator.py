"""The allocator simulation against sums done by hand, and its invariants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed.memory.caching_allocator import AllocatorEvent as Event
from mindspeed.memory.caching_allocator import (
    AllocatorPolicy,
    CachingAllocator,
    Peaks,
)

MIB = 2**20
POLICIES = [AllocatorPolicy(), AllocatorPolicy(pools=True), AllocatorPolicy(expandable=True)]


def replay(*events, **policy):
    return CachingAllocator(AllocatorPolicy(**policy)).replay(events)


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of 1 MiB stays with the block
        (20 * MIB + 512, 20 * MIB + 512, 22 * MIB),
    ],
)
def test_segment_of_one_request(nbytes, allocated, reserved):
    assert replay(Event(0, nbytes)) == Peaks(allocated, reserved)


def test_freed_neighbours_are_merged_and_used_again():
    blocks = [Event(index, 5 * MIB) for index in range(4)]  # one slab of 20 MiB
    freed = [Event(index, 0) for index in (0, 2, 1)]
    assert replay(*blocks, *freed, Event(9, 14 * MIB)).reserved == 20 * MIB
    assert replay(*blocks, *freed, Event(9, 16 * MIB)).reserved == 36 * MIB


def test_the_smallest_free_block_that_fits_is_taken():
    events = [
        Event(0, 30 * MIB),
        Event(1, 12 * MIB),
        Event(0, 0),
        Event(1, 0),
    ]
    assert replay(*events, Event(2, 12 * MIB), Event(3, 30 * MIB)).reserved == 42 * MIB


def test_expandable_segment_grows_at_its_end():
    events = [Event(0, 30 * MIB), Event(0, 0), Event(1, 60 * MIB)]
    assert replay(*events).reserved == 90 * MIB
    assert replay(*events, expandable=True).reserved == 60 * MIB
    held = [
        Event(0, 30 * MIB),
        Event(1, 30 * MIB),
        Event(0, 0),
        Event(2, 40 * MIB),
    ]
    assert replay(*held, expandable=True).reserved == 100 * MIB  # the free 30 are at its beginning


def test_long_lived_blocks_leave_no_holes_between_short_lived_ones():
    """A state in the place of a freed activation: the next activation needs a new segment."""
    events = [
        Event(0, 40 * MIB), Event(1, 40 * MIB), Event(0, 0), Event(2, 6 * MIB, True),
        Event(3, 40 * MIB),
    ]  # fmt: skip
    assert replay(*events).reserved == 120 * MIB
    assert replay(*events, pools=True).reserved == 100 * MIB


def test_nothing():
    assert replay() == Peaks(0, 0)
    assert Peaks(0, 0).fragmentation == 0
    assert Peaks(3, 4).fragmentation == 0.25
    assert replay(Event(7, 0)) == Peaks(0, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30 * MIB), st.booleans(), st.integers(0, 20)), max_size=60),
    st.sampled_from(POLICIES),
)
def test_bookkeeping_holds_for_any_trace(requests, policy):
    """What is in use fits into what is reserved; freed completely, each segment is one block."""
    allocator, live, most, now = CachingAllocator(policy), {}, 0, 0
    for index, (nbytes, long_lived, freed) in enumerate(requests):
        allocator.replay([Event(index, nbytes, long_lived)])
        live[index] = nbytes
        now += nbytes
        most = max(most, now)
        if freed in live:
            allocator.replay([Event(freed, 0)])
            now -= live.pop(freed)
    peaks = allocator.replay([Event(index, 0) for index in live])
    assert most <= peaks.allocated <= peaks.reserved
    assert allocator._allocated == 0
    free = [block for pool in allocator._pools.values() for block in pool.free]
    assert sum(size for size, *_ in free) == allocator._reserved
    assert len(free) == allocator._segments
