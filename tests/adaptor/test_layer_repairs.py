"""Repairs of Megatron's layers: the defect without each, the right result with it."""

from __future__ import annotations

import pytest
import torch

from mindspeed.adaptor.repairs.attention import attention_logits, output_gate
from mindspeed.adaptor.repairs.layers import fp32_residual
from mindspeed.testing import RankError
from tests.adaptor import layer_repair_ranks
from tests.support.lazy import needs
from tests.support.release import brought_by, has_defect

needs("megatron.core")

ADAPTOR = "tests.support.warm"
RESIDUALS = [
    ("layernorm-gelu-bias", "te", True),
    ("moe-sequential", "local", False),
    ("mla", "te", False),
]


def test_fp32_residuals_stay_in_fp32(ranks):
    function = layer_repair_ranks.residual_streams
    (found,) = ranks(1, function, True, RESIDUALS, setup=ADAPTOR, timeout=120)
    for case, (messages, streams) in zip(RESIDUALS, found, strict=True):
        assert messages == "torch.float32"
        for start, attention, mlp, end, gradient in streams:
            assert end.dtype == gradient.dtype == torch.float32, case
            assert attention.dtype == torch.bfloat16 or "bias" in case[0]
            expected = start.float() + attention.float() + mlp.float()
            torch.testing.assert_close(end, expected, rtol=1e-6, atol=1e-6, msg=str(case))


def test_fp32_residuals_are_rounded_without_the_repair(ranks):
    function = layer_repair_ranks.residual_streams
    ((_, streams),) = ranks(1, function, False, RESIDUALS[:1], setup=ADAPTOR, timeout=120)[0]
    assert (streams[0][3].dtype == torch.bfloat16) is has_defect(fp32_residual)


@brought_by("0.16")
@pytest.mark.parametrize("spec", ["te", "local"])
def test_a_rank_gates_its_heads(ranks, spec):
    function = layer_repair_ranks.gated_attention
    (truth,) = ranks(1, function, spec, True, setup=ADAPTOR, timeout=120)
    for found in ranks(2, function, spec, True, setup=ADAPTOR, timeout=120):
        for name, value in truth.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)
    if has_defect(output_gate, "get_query_key_value_tensors"):
        with pytest.raises(RankError, match="invalid for input of size"):
            ranks(2, function, spec, False, setup=ADAPTOR, timeout=120)


@brought_by("0.16")
def test_padding_masks_are_sharded_like_hidden_states(ranks):
    """On the stage of the embedding and on later ones, over the model's own ranks."""
    for rank, stages in enumerate(ranks(4, layer_repair_ranks.padding_masks, setup=ADAPTOR)):
        part = layer_repair_ranks.MASK.chunk(2, dim=1)[rank // 2]
        for mask, length in stages:
            assert torch.equal(mask, part)
            assert length in (None, part.shape[1])


@pytest.mark.parametrize(
    ("model", "options", "part"),
    [
        ("layernorm-gelu-bias", {"mtp_num_layers": 1}, "multi-token prediction"),
        ("mla", {"transformer_impl": "local"}, "multi-latent attention in the local"),
    ],
)
def test_parts_that_ignore_the_group_of_the_model_are_refused(ranks, model, options, part):
    with pytest.raises(RankError, match=f"{part}.* build the model with the global group"):
        ranks(4, layer_repair_ranks.build_with_own_group, model, options, setup=ADAPTOR)


def test_cross_attention_that_ignores_the_group_of_its_model_is_refused(ranks):
    with pytest.raises(RankError, match=r"cross attention .* with the global group"):
        ranks(4, layer_repair_ranks.cross_attention_with_own_group, setup=ADAPTOR)


def test_muon_splits_off_the_gate(ranks):
    """Queries, gate, keys and values of each group, as attention splits them."""
    if not has_defect(output_gate, "get_megatron_muon_optimizer"):
        pytest.skip("Muon is refused with this Megatron")
    ((rows, groups),) = ranks(1, layer_repair_ranks.split_of_muon, True, setup=ADAPTOR)
    heads, size = 2, 8
    group = [1.0] * heads * size + [2.0] * heads * size + [3.0] * size + [4.0] * size
    assert rows.tolist() == group * groups
    ((rows, _),) = ranks(1, layer_repair_ranks.split_of_muon, False, setup=ADAPTOR)
    assert rows.tolist() != group * groups


@brought_by("0.16")
def test_the_logged_attention_logit_is_that_of_the_step(ranks):
    (found,) = ranks(1, layer_repair_ranks.logged_logits, True, setup=ADAPTOR)
    assert found[0] < found[2] < found[1]
    (found,) = ranks(1, layer_repair_ranks.logged_logits, False, setup=ADAPTOR)
    assert found[0] < found[2]
    assert (found[2] == found[1]) is has_defect(attention_logits, "qk_clip:clip_qk")


@brought_by("0.16")
@pytest.mark.parametrize("model", ["rmsnorm-swiglu-gqa", "mla"])
def test_clipping_scales_heads_above_the_threshold_only(ranks, model):
    """By 2 / 8, a quarter of the powers for queries and the rest for keys; values stay."""
    (found,) = ranks(1, layer_repair_ranks.clipped_heads, model, True, setup=ADAPTOR)
    for factors in found:
        assert factors[1:].unique().tolist() == [1.0]
    scales = {0.25**power for power in (0.25, 0.75, 1.0)} | {1.0}
    joint = torch.cat([factors[0] for factors in found])
    assert all(min(abs(factor - scale) for scale in scales) < 1e-5 for factor in joint.tolist())
    assert min(abs(factor - 0.25**0.25) for factor in joint.tolist()) < 1e-5
    assert min(abs(factor - 0.25**0.75) for factor in joint.tolist()) < 1e-5
    (found,) = ranks(1, layer_repair_ranks.clipped_heads, model, False, setup=ADAPTOR)
    assert any(factors[1].isnan().any() for factors in found)


def test_activations_of_transformer_engine_without_experts(ranks):
    (found,) = ranks(1, layer_repair_ranks.activation_classes, True, setup=ADAPTOR)
    assert found == ["SwiGLU", "GELU"]
    assert ranks(1, layer_repair_ranks.activation_classes, False, setup=ADAPTOR) == [["none"] * 2]
    with pytest.raises(RankError, match="would build ReLU for SiLU without a gate"):
        ranks(1, layer_repair_ranks.activation_of_silu_without_gate, setup=ADAPTOR)


def test_patches_of_an_image_see_each_other(ranks):
    found = ranks(1, layer_repair_ranks.patches_that_see_later_ones, setup=ADAPTOR)
    assert found == [[True, True]]


def test_chunks_of_a_dense_model_are_turned_into_experts(ranks):
    (found,) = ranks(1, layer_repair_ranks.upcycled, True, setup=ADAPTOR)
    assert max(found) < 1e-5
    with pytest.raises(RankError, match=r"moe_ffn_hidden_size (must be None|is set but)"):
        ranks(1, layer_repair_ranks.upcycled, False, setup=ADAPTOR)


@pytest.mark.parametrize(
    ("repaired", "explicit", "factor", "interpolation"),
    [(True, {}, 32, 2), (True, {"rope_scaling_factor": 4.0}, 4, 2), (False, {}, 8, None)],
)
def test_rotary_flags_reach_the_model(ranks, repaired, explicit, factor, interpolation):
    function = layer_repair_ranks.frequencies
    ((found, positions),) = ranks(1, function, repaired, explicit, setup=ADAPTOR)
    unscaled = 500000 ** -torch.arange(0, 1, 0.25)
    assert found[0] == 1
    torch.testing.assert_close(found[-1], unscaled[-1] / factor)  # the longest wave
    assert positions == interpolation


def test_a_framework_without_arguments_builds_its_model(ranks):
    """It has imported Megatron-LM's module of arguments and set none."""
    ((_, positions),) = ranks(1, layer_repair_ranks.frequencies, True, {}, False, setup=ADAPTOR)
    assert positions is None
