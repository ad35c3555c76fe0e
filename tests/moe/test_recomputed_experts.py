"""Experts computed again stop after the activation: equal gradients, no way back of results."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from tests.moe import recompute_ranks as jobs
from tests.support.lazy import needs
from tests.tensor_parallel.region_ranks import FULL, flags

needs("megatron.core")

SETUP = "tests.support.warm"
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
WAYS = {
    "level 0": flags(FULL, 0),
    "level 1": flags(FULL, 1),
    "level 2": flags(FULL, 2),
    "selective": flags(MOE, 1),
}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
SHARED = {"moe_shared_expert_intermediate_size": 16}
SLICED = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 1,
          "expert_tensor_parallel_size": 2, "sequence_parallel": True}  # fmt: skip
OVERLAP = {"moe_alltoall_overlap_comm": True}
CASES = {
    "overlap, shared experts": ("te", OVERLAP, ALL_TO_ALL | SHARED),
    "plain, dropout": ("te", {}, ALL_TO_ALL | {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "gated shared experts": (
        "te", {"moe_permutation_async_comm": True},
        ALL_TO_ALL | SHARED | {"moe_shared_expert_gate": True},
    ),
    "one by one, local spec": ("local", OVERLAP, ALL_TO_ALL | SHARED | {"moe_grouped_gemm": False}),
    "stacked, local spec": ("local", OVERLAP, ALL_TO_ALL | {"moe_use_legacy_grouped_gemm": True}),
    "eight bits, sizes on the device": (
        "te", OVERLAP | {"moe_fp8_dispatch": "both", "moe_device_bound": 4.0},
        ALL_TO_ALL | {"hidden_size": 128},
    ),
    "all-gather": ("te", {"moe_allgather_overlap_comm": True}, SHARED),
    "sent once": ("te", {"moe_alltoall_exchange": "dedup"}, ALL_TO_ALL),
    "pieces": ("te", {"use_pipe_experts": True, "pipe_experts_multi_data": 2}, ALL_TO_ALL),
    "groups": ("te", {"moe_experts_pipeline_degree": 2}, ALL_TO_ALL | SLICED),
    "hot experts": ("te", {"balanced_moe_experts": True}, ALL_TO_ALL),
}  # fmt: skip


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_without_recomputation_to_the_bit(ranks, case):
    spec, programs, overrides = CASES[case]
    for found in ranks(2, jobs.compared, spec, programs, WAYS, overrides, setup=SETUP, timeout=240):
        for title in WAYS:
            assert found[title]["differ"] == [], title
        back = "reduce_scatter" if "moe_token_dispatcher_type" not in overrides else "all_to_all"
        calls = {title: found[title]["calls"].get(("recompute", back), 0) for title in WAYS}
        assert calls["level 1"] == calls["level 2"] == calls["selective"] < calls["level 0"]


GATED = {"gated_linear_unit": True, "moe_ffn_hidden_size": 48, "num_layers": 1}
ROWS = 2 * 32 * 2  # of both ranks: tokens, experts of each


def test_bytes_and_products(ranks):
    """3 + 3 dispatches and combines become 3 + 2; a third of the routed products goes."""
    ways = {name: WAYS[name] for name in ("level 0", "level 1")}
    program = {"moe_permutation_async_comm": True}
    saved = 0
    for found in ranks(
        2, jobs.compared, "te", program, ways, ALL_TO_ALL | GATED, setup=SETUP, timeout=240
    ):
        whole, less = found["level 0"], found["level 1"]
        both = whole["sent"]["forward"]
        assert whole["sent"]["recompute"] == both
        assert less["sent"] == {**whole["sent"], "recompute": both[:1]}
        assert len(both) == len(whole["sent"]["backward"]) == 2
        saved += whole["flops"]["recompute"] - less["flops"]["recompute"]
    assert saved == 2 * ROWS * 48 * 32  # one product; the first one is twice as wide


@pytest.mark.slow
@pytest.mark.parametrize("hooked", ["mlp", "mlp.experts", "mlp.experts.linear_fc2"])
def test_what_a_hook_may_read_is_computed(ranks, hooked):
    overrides = ALL_TO_ALL | GATED | {"hooked": f"decoder.layers.0.{hooked}"}
    ways = {name: WAYS[name] for name in ("level 0", "level 1")}
    for found in ranks(2, jobs.compared, "te", {}, ways, overrides, setup=SETUP, timeout=240):
        assert found["level 1"]["differ"] == []
        products = [found[title]["flops"]["recompute"] for title in ways]
        assert products[0] == products[1]
        assert len(found["level 1"]["sent"]["recompute"]) == 1 + (hooked == "mlp")


REFUSED = {
    "latent experts": ({"moe_latent_size": 8}, "up-projection of latent experts reads"),
    "no experts": ({"num_experts": None}, "the model has no experts; give mlp instead"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    values, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        registry.resolve(flags(MOE, 1) | {"num_experts": 4} | values, "cpu")
