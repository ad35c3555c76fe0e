"""Which part of sizes that do not divide a rank has, and where it is in the whole weight."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.tensor_parallel.unaligned.rows import padded_index
from mindspeed.tensor_parallel.unaligned.sizes import (
    ModelSizes,
    Share,
    imbalance,
    offset,
    part,
    parts,
)


def test_the_examples_of_the_documentation():
    assert parts(1026, 4) == (257, 257, 256, 256)
    assert parts(25, 4) == (7, 6, 6, 6) and imbalance(25, 4) == 1.12
    assert parts(3, 4) == (1, 1, 1, 0)


@given(st.integers(0, 5000), st.integers(1, 64))
def test_parts_cover_all_units_in_order(n, ranks):
    sizes = parts(n, ranks)
    assert sum(sizes) == n and max(sizes) - min(sizes) <= 1
    assert sizes == tuple(sorted(sizes, reverse=True))
    assert [offset(n, ranks, rank) for rank in range(ranks)] == [
        sum(sizes[:rank]) for rank in range(ranks)
    ]
    assert [part(n, ranks, rank) for rank in range(ranks)] == list(sizes)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 5), st.integers(1, 2))
def test_blocks_of_all_ranks_cover_the_whole_dimension_once(count, ranks, unit, stride):
    """``unit`` rows belong together; with stride 2 there are two blocks of them."""
    if count < ranks:
        return
    rows = []
    for rank in range(ranks):
        share = Share(count, ranks, rank)
        divisible = share.divisible * unit * stride
        assert divisible % ranks == 0
        blocks = share.blocks(divisible, stride)
        assert len(blocks) == stride
        assert sum(length for _, length in blocks) == divisible // ranks
        assert share.total(divisible) == count * unit * stride
        rows += [row for start, length in blocks for row in range(start, start + length)]
    assert sorted(rows) == list(range(count * unit * stride))


def test_25_heads_of_128_on_4_ranks():
    """qkv 9600 x 3200: 2688 and 2304 rows; projection: 896 and 768 columns."""
    first, last = Share(25, 4, 0), Share(25, 4, 3)
    assert (first.divisible, last.divisible) == (28, 24)
    assert first.blocks(28 * 3 * 128, 1) == [(0, 2688)]
    assert last.blocks(24 * 3 * 128, 1) == [(19 * 384, 2304)]
    assert (first.blocks(28 * 128, 1), last.blocks(24 * 128, 1)) == ([(0, 896)], [(2432, 768)])


def test_a_gated_mlp_splits_each_half():
    """An odd part of both halves together would mix gate and up projection."""
    assert Share(7, 2, 0).blocks(2 * 8, 2) == [(0, 4), (7, 4)]
    assert Share(7, 2, 1).blocks(2 * 6, 2) == [(4, 3), (11, 3)]


@pytest.mark.parametrize(
    ("heads", "groups", "ranks", "uneven"),
    [
        (25, 25, 4, True),
        (10, 5, 2, True),
        (8, 4, 2, False),
        (8, 2, 4, False),  # Megatron repeats groups
        (6, 2, 4, True),
        (20, 5, 4, True),
    ],
)
def test_attention_that_megatron_cannot_shard(heads, groups, ranks, uneven):
    assert ModelSizes(heads, groups, 64).uneven_attention(ranks) == uneven


def test_values_of_configs():
    sizes = ModelSizes(10, 5, 7, 9)
    assert sizes.of_rank(2, 1) == {
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 6,
    }
    assert list(sizes.report(2)) == [
        "query groups 3, 2 (largest / mean 1.20)",
        "MLP channels 4, 3 (largest / mean 1.14)",
        "sequence rows 5, 4 (largest / mean 1.11)",
    ]
    assert ModelSizes(8, 4, 8, 8).of_rank(2, 0) == ModelSizes(8, 4, 8, 8).counts(2) == {}


def test_counts_that_a_config_accepts():
    sizes = ModelSizes(10, 5, 7).counts(2)
    assert sizes == {"num_attention_heads": 10, "num_query_groups": 5}
    groups = sizes["num_query_groups"]
    assert (groups % 2, groups % 3, groups // 2, 7 % groups) == (0, 2, 2, 2)
    for plain in (groups + 0, copy.copy(groups), pickle.loads(pickle.dumps(groups))):
        assert type(plain) is int and plain == 5
    assert list(ModelSizes(25, 25, 7).counts(4)) == ["num_attention_heads"]


def test_rows_with_padding():
    assert padded_index((3, 2)) == [0, 1, 2, 3, 4, 0]
    assert padded_index((1, 1, 0)) == [0, 1, 0]
