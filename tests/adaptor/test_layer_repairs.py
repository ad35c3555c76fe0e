"""Repairs of Megatron's layers: the defect without each, the right result with it."""

from __future__ import annotations

import pytest
import torch

from mindspeed.testing import RankError
from tests.adaptor import layer_repair_ranks
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
MODELS = ("layernorm-gelu-bias", "moe-sequential", "mla")
RESIDUALS = [(name, spec, spec == "te") for name in MODELS for spec in ("te", "local")]


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
    assert streams[0][3].dtype == torch.bfloat16


@pytest.mark.parametrize("spec", ["te", "local"])
def test_a_rank_gates_its_heads(ranks, spec):
    function = layer_repair_ranks.gated_attention
    (truth,) = ranks(1, function, spec, True, setup=ADAPTOR, timeout=120)
    for found in ranks(2, function, spec, True, setup=ADAPTOR, timeout=120):
        for name, value in truth.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)
    with pytest.raises(RankError, match="invalid for input of size"):
        ranks(2, function, spec, False, setup=ADAPTOR, timeout=120)


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
