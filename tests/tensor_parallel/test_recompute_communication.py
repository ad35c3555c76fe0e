"""Recomputation without communication: equal to no recomputation to the bit."""

from __future__ import annotations

import pytest

from tests.support.lazy import needs
from tests.tensor_parallel import region_ranks
from tests.tensor_parallel.region_ranks import FULL, MLP, flags

needs("megatron.core")

SETUP = "tests.support.warm"
BLOCK = {**FULL, "recompute_method": "block"}
WAYS = {
    "full 1": flags(FULL, 1),
    "full 2": flags(FULL, 2),
    "block": flags(BLOCK, 2),
    "selective": flags(MLP, 1),
}
FUSED = {"bias_dropout_fusion": True}
SP, DROPOUT = {"sequence_parallel": True}, {"hidden_dropout": 0.1, "attention_dropout": 0.1}
CASES = {
    "dense": ("rmsnorm-swiglu-gqa", "te", 1, {}, {}),
    "bias, dropout, TP": ("layernorm-gelu-bias", "te", 2, DROPOUT, {}),
    "bias, SP, two passes": ("layernorm-gelu-bias", "te", 2, SP, {"passes": 2}),
    "local spec, dropout, SP": ("layernorm-gelu-bias", "local", 2, SP | DROPOUT, {}),
    "fused bias-dropout-add": ("rmsnorm-swiglu-gqa", "te", 2, SP | FUSED, {}),
    "fp32 residuals": (
        "rmsnorm-swiglu-gqa", "te", 2, SP | {"fp32_residual_connection": True}, {}
    ),
    "latent attention": ("mla", "te", 2, SP, {}),
    "frozen layers": ("rmsnorm-swiglu-gqa", "te", 2, SP, {"frozen": "layers.0"}),
    "frozen weights": ("rmsnorm-swiglu-gqa", "te", 2, SP, {"frozen": "linear_"}),
    "adapters": (
        "rmsnorm-swiglu-gqa", "te", 2, SP | DROPOUT,
        {"lora": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")},
    ),
    "adapters, one rank": (
        "rmsnorm-swiglu-gqa", "local", 1, {}, {"lora": ("linear_proj", "linear_fc2")}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_without_recomputation_to_the_bit(ranks, case):
    name, spec, size, overrides, more = CASES[case]
    for found in ranks(
        size, region_ranks.compared, name, spec, WAYS, overrides, more, setup=SETUP, timeout=240
    ):
        for title in WAYS:
            assert found[title]["differ"] == [], title
        if size == 1:
            continue
        reduces = "reduce_scatter" if "sequence_parallel" in overrides else "all_reduce"
        again = {
            title: [found[title]["calls"]["recompute", op] for op in (reduces, "all_gather")]
            for title in WAYS
        }
        passes, gathers = more.get("passes", 1), reduces == "reduce_scatter"
        assert [again[title][0] for title in WAYS] == [2 * passes, 0, 0, 0]
        if name != "mla":  # which gathers latent vectors, too
            expected = [4, 4, 2, 2] if gathers else [0] * 4
            if gathers:  # the gradient's, too, unless dropout's mask is what backward needs first
                ahead = [0, 0, 0, 2] if "hidden_dropout" in overrides else [2, 4, 2, 2]
                expected = [n + m for n, m in zip(expected, ahead, strict=True)]
            assert [again[title][1] for title in WAYS] == [passes * n for n in expected]


def test_experts_are_recomputed_and_attention_is_not_reduced_again(ranks):
    ways = {"full 1": flags(FULL, 1), "full 2": flags(FULL, 2)}
    overrides = {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss", **SP}
    for found in ranks(
        2, region_ranks.compared, "moe-grouped", "te", ways, overrides, setup=SETUP, timeout=240
    ):
        one, two = (found[title]["calls"] for title in ways)
        assert found["full 1"]["differ"] == found["full 2"]["differ"] == []
        assert one["recompute", "reduce_scatter"] - two["recompute", "reduce_scatter"] == 2
