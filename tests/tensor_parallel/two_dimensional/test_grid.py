"""The grid without Megatron: linear layers, norms, order of tokens, bytes."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.tensor_parallel.two_dimensional import cost
from mindspeed.tensor_parallel.two_dimensional.grid import (
    sequence_groups,
    token_order,
    x_groups,
    y_groups,
)
from tests.tensor_parallel.two_dimensional import grid_ranks

SETUP = "mindspeed.te.kernels"
UNIT = grid_ranks.SEQUENCE * grid_ranks.BATCH * 8  # bytes of s b in fp64; divided by p below
GATHER, SCATTER, BACKWARD = "overlap_gather", "overlap_scatter", "overlap_backward"


def mlp_widths() -> cost.Widths:
    """Of the MLP alone: no attention."""
    return cost.Widths(grid_ranks.HIDDEN, 0, 0, grid_ranks.FFN, grid_ranks.FFN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overlaps", [(), (GATHER, BACKWARD), (SCATTER,)], ids=lambda o: "-".join(o) or "plain"
)
def test_mlp_on_a_grid_equals_one_rank_and_sends_the_bytes_of_the_formula(ranks, overlaps):
    results = ranks(4, grid_ranks.mlp, 2, overlaps, setup=SETUP)
    # Half of one dimension's terms in h belong to attention.
    hidden, ffn = grid_ranks.HIDDEN, grid_ranks.FFN
    for result in results:
        assert set(result["differences"]) == {"out", "x", "w1", "b1", "w2", "b2"}
        assert max(result["differences"].values()) < 1e-11
        assert result["bytes"]["forward"] == UNIT // 4 * (2 * hidden + 2 * ffn)
        assert result["bytes"]["backward"] == UNIT // 4 * (3 * hidden + 3 * ffn)
    operations = {"all_gather", "reduce_scatter"} | (
        {"send", "recv"} if GATHER in overlaps else set()
    )
    assert set(results[0]["operations"]) == operations
    if not overlaps:
        assert results[0]["calls"] == {"forward": 4, "backward": 6}


def test_integers_make_results_equal_to_the_bit_on_larger_grids(ranks):
    for x in (4, 2):
        for result in ranks(8, grid_ranks.mlp, x, (GATHER, BACKWARD), True, setup=SETUP):
            assert set(result["differences"].values()) == {0.0}
            y, hidden, ffn = 8 // x, grid_ranks.HIDDEN, grid_ranks.FFN
            expected = 2 * hidden * (x - 1) + 2 * ffn * (y - 1)
            assert result["bytes"]["forward"] == UNIT // 8 * expected


def test_integers_make_chunks_equal_to_the_bit(ranks):
    for result in ranks(4, grid_ranks.mlp, 2, (SCATTER,), True, setup=SETUP):
        assert set(result["differences"].values()) == {0.0}


@pytest.mark.parametrize("frozen", [("w1", "w2", "b1", "b2"), ("x",)])
def test_what_needs_no_gradient_is_not_communicated(ranks, frozen):
    (result, *_) = ranks(4, grid_ranks.mlp, 2, (), False, frozen, setup=SETUP)
    assert max(result["differences"].values()) < 1e-11
    assert set(result["differences"]) == {"out", "x", "w1", "b1", "w2", "b2"} - set(frozen)
    # dy is gathered and dx is reduced; without weights nothing else, without x not dx of fc1.
    assert result["calls"]["backward"] == (4 if "w1" in frozen else 5)


@pytest.mark.slow
@pytest.mark.parametrize("rms", [True, False], ids=["rms", "layer"])
@pytest.mark.parametrize(
    ("offset", "dtype", "tolerance"),
    [(0.0, torch.float64, 1e-13), (1000.0, torch.float32, 2e-4), (0.0, torch.bfloat16, 2e-2)],
    ids=["fp64", "large-mean", "bf16"],
)
def test_norms_equal_torch(ranks, rms, offset, dtype, tolerance):
    for result in ranks(4, grid_ranks.norms, 2, rms, offset, dtype, setup=SETUP):
        assert set(result) == {"out", "x", "weight"} | (set() if rms else {"bias"})
        assert max(result.values()) < tolerance, result


def test_hidden_states_reach_the_grid_and_attention_its_tokens(ranks):
    for result in ranks(4, grid_ranks.exchanged, 2, setup=SETUP):
        assert result["back"] and result["gradient"] and result["tokens"]
        assert result["bytes"] == 2 * result["shard"] // 2  # (Y - 1)/Y, there and back


def test_ranks_of_a_grid():
    assert x_groups(range(8), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert y_groups(range(8), 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    two = sequence_groups([[0, 1, 2, 3], [4, 5, 6, 7]], 2)
    assert two == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize(("x", "y"), [(2, 2), (4, 2), (2, 4), (3, 2), (2, 3)])
def test_the_token_order_gives_each_rank_of_attention_equal_work(x, y):
    tokens = 12 * x * y
    order = token_order(tokens, x, y)
    assert sorted(order.tolist()) == list(range(tokens))
    by_rank = order.view(y, x, -1).transpose(0, 1).reshape(y, -1)
    work = {int(rows.sum()) for rows in by_rank}
    assert len(work) == 1, "a causal mask lets token i see i + 1 keys"


@pytest.mark.parametrize(("tokens", "x", "y"), [(10, 2, 2), (6, 3, 2), (12, 2, 4)])
def test_tokens_that_cannot_be_shared_are_refused(tokens, x, y):
    if tokens % (x * y) == 0 and tokens % (2 * y) == 0:
        pytest.fail("the case must be indivisible")
    with pytest.raises(ConfigError, match=rf"{tokens} tokens .* {x * y} and by .* {2 * y}"):
        token_order(tokens, x, y)
