"""A model with ``--use-fused-rmsnorm`` computes what it computes without."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from tests.features import fused_ranks
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
ON = {"use_fused_rmsnorm": True}
MODELS = {
    "blocks": ("rmsnorm-swiglu-gqa", {}, 5),
    "queries-and-keys": ("qk-layernorm", {}, 9),
    "zero-centered": ("rmsnorm-swiglu-gqa", {"layernorm_zero_centered_gamma": True}, 5),
}


@pytest.mark.weekly_cases(
    "blocks-local-tp-sp", "queries-and-keys-te-tp-sp", "zero-centered-local-tp-sp"
)
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("world_size", [1, 2], ids=["one-rank", "tp-sp"])
@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients_are_equal(ranks, model, spec, world_size):
    name, overrides, norms = MODELS[model]
    arguments = (ON, name, spec, overrides)
    for fused, plain in ranks(
        world_size, fused_ranks.with_and_without, *arguments, setup=ADAPTOR, timeout=240
    ):
        fused_ranks.assert_equal(fused.tensors, plain.tensors, 4e-6)
        assert fused.ops["mindspeed::rms_norm"] == norms
        assert plain.ops["mindspeed::rms_norm"] == 0


@pytest.mark.parametrize("spec", ["te", "local"])
def test_fused_norm_saves_six_bytes_less_per_element(ranks, spec):
    """In bf16; torch's own keeps 8 where it has no fused kernel, and no number a row."""
    arguments = (ON, "rmsnorm-swiglu-gqa", spec, {}, {}, torch.bfloat16)
    ((fused, plain),) = ranks(1, fused_ranks.with_and_without, *arguments, setup=ADAPTOR)
    norms, tokens, hidden_size = 5, 32, 32
    assert plain.saved - fused.saved == norms * tokens * 6 * hidden_size
    ((_, exact),) = ranks(1, fused_ranks.with_and_without, *arguments[:-1], setup=ADAPTOR)
    fused_ranks.assert_as_exact(fused.tensors, plain.tensors, exact.tensors)


def test_flag():
    assert [f.name for f in resolve(ON, "cpu").enabled] == ["fused-rmsnorm"]
    with pytest.raises(ConfigError, match=r"--use-fused-rmsnorm: .*--normalization RMSNorm"):
        resolve(ON | {"normalization": "LayerNorm"}, "cpu")
    with pytest.raises(ConfigError, match="--optimization-level >= 1"):
        resolve(ON | {"optimization_level": 0}, "cpu")
