"""A model with ``--use-fused-rotary-pos-emb`` computes what it computes without."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from tests.features import fused_ranks
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
ON = {"use_fused_rotary_pos_emb": True}
MODEL = "rmsnorm-swiglu-gqa"
FUSION, UNFUSED = {"apply_rope_fusion": True}, {"apply_rope_fusion": False}
OP = "mindspeed::rotary_position_embedding"


@pytest.mark.weekly_cases("halves-local-*", "pairs-te-tp-sp")
@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("world_size", [1, 2], ids=["one-rank", "tp-sp"])
@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("rotary", [{}, {"rotary_interleaved": True}], ids=["halves", "pairs"])
def test_losses_and_gradients_are_equal(ranks, rotary, spec, world_size):
    arguments = (ON, MODEL, spec, FUSION | rotary, UNFUSED, torch.float64)
    for fused, plain in ranks(
        world_size, fused_ranks.with_and_without, *arguments, setup=ADAPTOR, timeout=240
    ):
        fused_ranks.assert_equal(fused.tensors, plain.tensors, 2e-6)
        assert fused.ops[OP] == 4  # queries and keys of two layers
        assert plain.ops[OP] == 0


def test_cosine_and_sine_are_computed_once_for_all_layers(ranks):
    """Megatron's own embedding computes both for queries and for keys of every layer."""
    arguments = (ON, MODEL, "te", FUSION, UNFUSED)
    ((fused, plain),) = ranks(1, fused_ranks.with_and_without, *arguments, setup=ADAPTOR)
    layers = 2
    assert [plain.ops[f"aten::{name}"] for name in ("cos", "sin")] == [2 * layers] * 2
    assert [fused.ops[f"aten::{name}"] for name in ("cos", "sin")] == [1, 1]


def test_flag():
    assert [f.name for f in resolve(ON, "cpu").enabled] == ["fused-rope"]
    assert not resolve({}, "cpu").enabled
    for values, message in (
        ({"position_embedding_type": "learned_absolute"}, "add --position-embedding-type rope"),
        ({"apply_rope_fusion": False}, "--no-rope-fusion"),
        ({"multi_latent_attention": True}, "multi-latent attention"),
        ({"optimization_level": 0}, "--optimization-level >= 1"),
    ):
        with pytest.raises(ConfigError, match=f"--use-fused-rotary-pos-emb: .*{message}"):
            resolve(ON | values, "cpu")
