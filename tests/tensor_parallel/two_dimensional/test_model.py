"""A GPT model of Megatron on a grid of four ranks against the same model on one."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.lazy import needs
from tests.tensor_parallel.two_dimensional import model_ranks
from tests.tensor_parallel.two_dimensional.model_ranks import Case

needs("megatron.core")
SETUP = "tests.support.warm"

CASES = {
    "te": Case(qk_layernorm=True, zero_centered=True),
    "te-layer-norm-bias-tied": Case(
        normalization="LayerNorm", bias=True, gated=False, position="learned_absolute", tied=True
    ),
    "local-bias-ulysses": Case("local", bias=True, comm_type="a2a", qk_layernorm=True),
    "local-layer-norm-gated": Case("local", "LayerNorm", bias=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_on_a_grid_equals_one_rank(ranks, name):
    """Logits and every gradient in fp64; biases of both kinds, norms, tied embeddings."""
    # Megatron's norms of the local spec have fp32 weights, whose gradients are rounded.
    tolerance = 1e-6 if CASES[name].spec == "local" else 1e-11
    (truth,) = ranks(1, model_ranks.of_one_rank, CASES[name], setup=SETUP)
    for result in ranks(4, model_ranks.on_grid, CASES[name], 2, 2, truth, setup=SETUP):
        assert len(result) == len(truth["parameters"]) + 1
        assert max(result.values()) < tolerance, result


def test_a_layer_keeps_what_sequence_parallelism_keeps(ranks):
    grid = ranks(4, model_ranks.layer_bytes, 2, 2, setup=SETUP)
    plain = ranks(4, model_ranks.layer_bytes, 0, 4, setup=SETUP)
    shard = model_ranks.SEQUENCE * model_ranks.BATCH * model_ranks.SIZES["hidden_size"] * 4 // 4
    statistics = model_ranks.SEQUENCE * model_ranks.BATCH * 4
    for found, expected in zip(grid, plain, strict=True):
        # Less: the normalised input, which torch's two norms keep, and half of the rotary table.
        less = 2 * (shard + statistics // 4) + 2 * model_ranks.SEQUENCE // 2 * 8 * 4 * 2
        # More: statistics of s/X rows, not s/p, and the keys and values that arrived last.
        more = 2 * (statistics // 2) + 2 * shard
        assert found == expected - less + more


def test_dropout_draws_for_each_shard_and_again_for_recomputation(ranks):
    """Hidden states are sharded over all ranks, so no two of them may drop alike."""
    results = ranks(4, model_ranks.dropout_masks, 2, 2, setup=SETUP)
    for forward, recomputed in results:
        embedding, first, second = forward[0], forward[1:3], forward[3:]
        assert len(second) == 2
        pairs = zip(recomputed, [*second, *first], strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        for mask in (embedding, *first, *second):
            assert 0.35 < mask.float().mean() < 0.65
    kept = [torch.cat([mask.flatten() for mask in forward]) for forward, _ in results]
    for one, other in itertools.combinations(kept, 2):
        assert 0.4 < (one == other).float().mean() < 0.6


@pytest.mark.slow
def test_what_a_grid_cannot_do_is_refused_where_there_are_no_flags(ranks):
    expected = {
        "hidden": "--tp-2d does not work with hidden states as input",
        "packed": "--tp-2d does not work with packed documents",
        "generation": "--tp-2d does not work with generation",
        "length": "6 tokens on each context-parallel rank must be divisible by",
        "heads": "num_query_groups 1 must be divisible by 2",
        "size": "--tp-x 8 * --tp-y 2 = 16 must be the tensor-parallel size 4",
    }
    for found in ranks(4, model_ranks.refusals, setup=SETUP):
        assert set(found) == set(expected)
        for name, text in expected.items():
            assert text in found[name], found
