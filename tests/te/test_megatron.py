"""Megatron's models on the substitute: equal to plain modules, on one rank and on two."""

from __future__ import annotations

import pytest
import torch

from tests.support import gpt_ranks
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"


def assert_equal(actual, expected, tolerance):
    """Compare relative to the largest value of each tensor."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        atol = tolerance * max(value.abs().max().item(), 1.0)
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", gpt_ranks.CONFIGS)
def test_gpt_with_the_te_spec_equals_plain_modules(ranks, name):
    te, reference = ranks(1, gpt_ranks.te_and_reference, name, setup=ADAPTOR, timeout=240)[0]
    assert_equal(te, reference, 4e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layernorm-gelu-bias", "rmsnorm-swiglu-gqa", "moe-grouped"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_tensor_parallel_equals_one_rank(ranks, name, sequence_parallel):
    if "moe" in name and not sequence_parallel:
        pytest.skip("Megatron's mixture of experts with tensor parallelism needs sequence parallel")
    options = {"setup": ADAPTOR, "timeout": 240}
    whole = ranks(1, gpt_ranks.te_on_ranks, name, **options)[0]
    runner = gpt_ranks.te_on_ranks_sp if sequence_parallel else gpt_ranks.te_on_ranks
    for part in ranks(2, runner, name, **options):
        assert_equal(part, whole, 4e-6)


EXPECTED_LAYER_KEYS = {
    "layernorm-gelu-bias": """
        self_attention.linear_qkv.layer_norm_weight self_attention.linear_qkv.layer_norm_bias
        self_attention.linear_qkv.weight self_attention.linear_qkv.bias
        self_attention.linear_qkv._extra_state
        self_attention.linear_proj.weight self_attention.linear_proj.bias
        self_attention.linear_proj._extra_state
        mlp.linear_fc1.layer_norm_weight mlp.linear_fc1.layer_norm_bias
        mlp.linear_fc1.weight mlp.linear_fc1.bias mlp.linear_fc1._extra_state
        mlp.linear_fc2.weight mlp.linear_fc2.bias mlp.linear_fc2._extra_state""",
    "moe-grouped": """
        self_attention.linear_qkv.layer_norm_weight self_attention.linear_qkv.layer_norm_bias
        self_attention.linear_qkv.weight self_attention.linear_qkv._extra_state
        self_attention.linear_proj.weight self_attention.linear_proj._extra_state
        pre_mlp_layernorm.weight pre_mlp_layernorm.bias pre_mlp_layernorm._extra_state
        mlp.router.weight
        mlp.experts.experts.linear_fc1.weight mlp.experts.experts.linear_fc1._extra_state
        mlp.experts.experts.linear_fc2.weight mlp.experts.experts.linear_fc2._extra_state""",
}


@pytest.mark.parametrize("name", EXPECTED_LAYER_KEYS)
def test_checkpoint_keys_are_those_of_a_transformer_engine_model(ranks, name):
    keys = ranks(1, gpt_ranks.state_dict_keys, name, setup=ADAPTOR, timeout=240)[0]
    expected = {f"decoder.layers.{key}" for key in EXPECTED_LAYER_KEYS[name].split()}
    expected |= {f"decoder.final_layernorm.{key}" for key in ("weight", "bias", "_extra_state")}
    expected |= {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert set(keys) - {"output_layer._extra_state"} == expected
