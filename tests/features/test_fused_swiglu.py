"""A model with ``--use-fused-swiglu`` computes what it computes without."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from tests.features import fused_ranks
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
ON = {"use_fused_swiglu": True}
SWIGLU = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "bias_activation_fusion": True,
}
UNFUSED = {"bias_activation_fusion": False}
MODELS = {
    "dense": ("rmsnorm-swiglu-gqa", {}),
    "bias": ("layernorm-gelu-bias", {}),
    "experts": ("moe-sequential", {"moe_shared_expert_intermediate_size": 48}),
    "grouped-experts": ("moe-grouped", {}),
}


@pytest.mark.weekly_cases("dense-local-tp-sp", "bias-te-tp-sp", "experts-te-one-rank")
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("world_size", [1, 2], ids=["one-rank", "tp-sp"])
@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients_are_equal(ranks, model, spec, world_size):
    name, overrides = MODELS[model]
    if model == "grouped-experts" and spec == "local":
        pytest.skip("Megatron's own grouped experts need the package grouped_gemm")
    arguments = (ON, name, spec, SWIGLU | overrides, UNFUSED)
    for fused, plain in ranks(
        world_size, fused_ranks.with_and_without, *arguments, setup=ADAPTOR, timeout=240
    ):
        fused_ranks.assert_equal(fused.tensors, plain.tensors, 2e-6)
        assert fused.ops["mindspeed::swiglu"] > 0
        assert plain.ops["mindspeed::swiglu"] == 0


@pytest.mark.parametrize("spec", ["te", "local"])
def test_fused_swiglu_saves_half_the_activation_bytes(ranks, spec):
    """4 bytes in bf16 for each of ffn_hidden_size activations; Megatron's unfused formula, which
    adds an offset to the second half, keeps 8."""
    arguments = (ON, "rmsnorm-swiglu-gqa", spec, SWIGLU, UNFUSED, torch.bfloat16)
    ((fused, plain),) = ranks(1, fused_ranks.with_and_without, *arguments, setup=ADAPTOR)
    layers, tokens, ffn_hidden_size = 2, 32, 4 * 32
    assert plain.saved - fused.saved == 4 * layers * tokens * ffn_hidden_size
    ((_, exact),) = ranks(1, fused_ranks.with_and_without, *arguments[:-1], setup=ADAPTOR)
    fused_ranks.assert_as_exact(fused.tensors, plain.tensors, exact.tensors)


def test_fp8_saved_input_gives_the_gradients_of_megatron(ranks):
    fp8 = {"activation_func_fp8_input_store": True}
    arguments = (ON, "rmsnorm-swiglu-gqa", "te", SWIGLU | fp8, UNFUSED | {next(iter(fp8)): False})
    ((fused, exact),) = ranks(1, fused_ranks.with_and_without, *arguments, setup=ADAPTOR)
    ((fused, plain),) = ranks(
        1, fused_ranks.with_and_without, *arguments[:3], SWIGLU | fp8, setup=ADAPTOR
    )
    fused_ranks.assert_equal(fused.tensors, plain.tensors, 2e-6)
    with pytest.raises(AssertionError, match="embedding"):
        fused_ranks.assert_equal(fused.tensors, exact.tensors, 2e-6)


def test_flag():
    assert [f.name for f in resolve(ON | {"swiglu": True}, "cpu").enabled] == ["fused-swiglu"]
    assert not resolve({"swiglu": True}, "cpu").enabled
    with pytest.raises(ConfigError, match=r"--use-fused-swiglu: .*add --swiglu"):
        resolve(ON | {"swiglu": False}, "cpu")
    with pytest.raises(ConfigError, match="--no-bias-swiglu-fusion"):
        resolve(ON | {"swiglu": True, "bias_swiglu_fusion": False}, "cpu")
    with pytest.raises(ConfigError, match="--optimization-level >= 1"):
        resolve(ON | {"swiglu": True, "optimization_level": 0}, "cpu")
