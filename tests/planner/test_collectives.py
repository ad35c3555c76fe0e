"""Collectives over levels: closed forms, links shared by concurrent groups, monotonicity."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed.planner.cluster.collectives import OPERATIONS, Level, seconds

MIB = 1 << 20
NODE = Level("node", 8, 400, 2.0)
NETWORK = Level("network", None, 50, 5.0)
LEVELS = (NODE, NETWORK)
A, B = 2e-6, 400e9  # latency and bandwidth inside a node
AN, BN = 5e-6, 50e9  # between nodes
EIGHT, SIXTEEN = tuple(range(8)), tuple(range(16))


@pytest.mark.parametrize(
    ("op", "payload", "expected"),
    [
        ("all_gather", 64 * MIB, 7 * (A + 64 * MIB / B)),
        ("reduce_scatter", 512 * MIB, 7 * (A + 64 * MIB / B)),
        ("all_reduce", 512 * MIB, 14 * (A + 64 * MIB / B)),
        ("all_to_all", 512 * MIB, A + 7 * 64 * MIB / B),
        ("send", 64 * MIB, A + 64 * MIB / B),
        ("broadcast", 64 * MIB, 3 * A + 64 * MIB / B),
        ("all_reduce", 8, 2 * (3 * A + 8 / B)),
        ("barrier", 0, 6 * A),
        ("gather", 64 * MIB, A + 7 * 64 * MIB / B),
    ],
)
def test_a_group_inside_a_node_takes_the_textbook_time(
    op: str, payload: int, expected: float
) -> None:
    assert seconds(op, payload, EIGHT, LEVELS) == pytest.approx(expected, rel=1e-12)


def test_one_rank_per_node_uses_the_network_alone() -> None:
    ranks = (0, 8, 16, 24)
    assert seconds("all_gather", MIB, ranks, LEVELS) == pytest.approx(3 * (AN + MIB / BN))
    assert seconds("send", MIB, ranks, LEVELS) == pytest.approx(AN + MIB / BN)


def test_two_nodes_ring_or_hierarchical_whichever_is_faster() -> None:
    shard = 64 * MIB
    ring = max(15 * shard / B, 15 * shard / (8 * BN)) + 14 * A + AN
    levels_in_turn = (AN + shard / BN) + 7 * (A + 2 * shard / B)
    assert ring != pytest.approx(levels_in_turn)
    found = seconds("all_gather", shard, SIXTEEN, LEVELS)
    assert found == pytest.approx(min(ring, levels_in_turn), rel=1e-12)
    small = seconds("all_gather", 1024, SIXTEEN, LEVELS)
    assert small == pytest.approx((AN + 1024 / BN) + 7 * (A + 2048 / B), rel=1e-12)


def test_an_exchange_uses_all_levels_at_once() -> None:
    total = 512 * MIB
    inside, outside = total * 7 / 16 / B, total * 8 / 16 / BN
    found = seconds("all_to_all", total, SIXTEEN, LEVELS)
    assert found == pytest.approx(max(inside, outside) + AN, rel=1e-12)


def test_three_levels_go_inwards() -> None:
    die = Level("die", 2, 270, 1.0)
    levels = (die, NODE, NETWORK)
    shard = 1 * MIB
    hierarchical = (AN + shard / BN) + 3 * (A + 2 * shard / B) + (1e-6 + 8 * shard / 270e9)
    ring = (
        max(15 * shard / 270e9, 15 * shard / (2 * B), 15 * shard / (8 * BN)) + 8 * 1e-6 + 6 * A + AN
    )
    found = seconds("all_gather", shard, SIXTEEN, levels)
    assert found == pytest.approx(min(ring, hierarchical), rel=1e-12)


@pytest.mark.parametrize("members", [1, 2, 4, 8])
def test_concurrent_groups_share_the_links_of_their_nodes(members: int) -> None:
    """Every byte that leaves a node, of all groups, over all links of the node."""
    nodes = 4
    groups = [
        tuple(8 * node + first + i for node in range(nodes) for i in range(members))
        for first in range(0, 8, members)
    ]
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(8 * nodes))
    total = 1 << 40  # of the result, large: latency vanishes
    leaving: Counter[int] = Counter()
    for ranks in groups:
        # ``members`` rings, each with its part of the data; they leave a node at another rank.
        for left, right in pairwise((*ranks, ranks[0])):
            if left // 8 != right // 8:
                leaving[left // 8] += total * (len(ranks) - 1) // len(ranks)
    expected = leaving[0] / (8 * BN)
    found = seconds("reduce_scatter", total, groups[0], LEVELS)
    ring_inside = total * (4 * members - 1) / (4 * members) / B
    assert found == pytest.approx(max(expected, ring_inside), rel=1e-3)


def test_uneven_groups_have_the_fewest_links() -> None:
    uneven = (*range(8), *range(8, 12))
    rest = 11 / 12 * 1200 * MIB
    expected = max(rest / B, rest / (4 * BN)) + 10 * A + AN
    assert seconds("reduce_scatter", 1200 * MIB, uneven, LEVELS) == pytest.approx(expected)


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_single_rank_communicates_nothing(op: str) -> None:
    assert seconds(op, MIB, (3,), LEVELS) == 0.0


def test_unknown_operations_and_ranks_outside_are_named() -> None:
    with pytest.raises(ValueError, match="no collective 'all_sum'; there are all_gather"):
        seconds("all_sum", 8, EIGHT, LEVELS)
    with pytest.raises(ValueError, match=r"ranks 0 to 8 .* outermost level \(node\)"):
        seconds("all_gather", 8, (0, 8), (NODE,))


groups_of_ranks = st.builds(
    lambda count, stride: tuple(range(0, count * stride, stride)),
    st.integers(2, 24),
    st.sampled_from([1, 2, 4, 8, 16]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(OPERATIONS),
    groups_of_ranks,
    st.integers(0, 1 << 32),
    st.integers(0, 1 << 32),
    st.floats(1.0, 4.0),
)
def test_more_bytes_slower_links_and_longer_steps_never_save_time(
    op: str, ranks: tuple[int, ...], nbytes: int, more: int, factor: float
) -> None:
    usual = seconds(op, nbytes, ranks, LEVELS)
    bound = usual * (1 - 1e-12)
    assert seconds(op, nbytes + more, ranks, LEVELS) >= bound
    for index in range(2):
        level = LEVELS[index]
        slow = Level(level.name, level.size, level.gbs / factor, level.latency_us)
        late = Level(level.name, level.size, level.gbs, level.latency_us * factor)
        for other in (slow, late):
            levels = tuple(other if i == index else LEVELS[i] for i in range(2))
            assert seconds(op, nbytes, ranks, levels) >= bound


@settings(max_examples=40, deadline=None)
@given(groups_of_ranks, st.integers(1, 1 << 32))
def test_an_all_reduce_is_never_slower_than_its_two_halves(
    ranks: tuple[int, ...], nbytes: int
) -> None:
    halves = seconds("reduce_scatter", nbytes, ranks, LEVELS) + seconds(
        "all_gather", nbytes / len(ranks), ranks, LEVELS
    )
    assert seconds("all_reduce", nbytes, ranks, LEVELS) <= halves * (1 + 1e-12)
