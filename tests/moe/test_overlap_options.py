"""Overlapped programs compute Megatron's own layer with its options of routers and experts."""

from __future__ import annotations

import pytest

from tests.moe import layer_ranks as jobs
from tests.moe.save_ranks import saved_bytes
from tests.moe.test_overlap import ADAPTOR, SHARED, VARIANTS, check
from tests.support.lazy import needs

needs("megatron.core")

DROP = {"moe_expert_capacity_factor": 0.6}
AUX = {"moe_aux_loss_coeff": 0.1}
RECOMPUTE = {"recompute_granularity": "selective"}

BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}

LAYERS = {
    "top-1": ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, {}),
    "one-local-expert": ({"num_moe_experts": 2, "moe_router_topk": 2}, {}),
    "dropped": (DROP, {}),
    "dropped-by-position": ({**DROP, "moe_token_drop_policy": "position"}, {}),
    "padded": ({**DROP, "moe_pad_expert_input_to_capacity": True}, {}),
    "aux-loss": ({**AUX, "moe_router_load_balancing_type": "aux_loss"}, {}),
    "seq-aux-loss": ({**AUX, "moe_router_load_balancing_type": "seq_aux_loss"}, {}),
    "global-aux-loss": ({**AUX, "moe_router_load_balancing_type": "global_aux_loss"}, {}),
    "z-loss": ({"moe_z_loss_coeff": 0.1}, {}),
    "jitter": ({"moe_input_jitter_eps": 0.1}, {}),
    "expert-bias": (BIAS, {}),
    "empty-experts-and-rank": ({**BIAS, **SHARED}, {"crowded": True}),
    "evaluation": (SHARED, {"training": False}),
    "sinkhorn": ({"moe_router_load_balancing_type": "sinkhorn"}, {}),
    "shared-gate": ({**SHARED, "moe_shared_expert_gate": True}, {}),
    "router-fp64": ({"moe_router_dtype": "fp64"}, {}),
    "probs-on-input": (
        {
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
            "moe_apply_probs_on_input": True,
        },
        {},
    ),
    "recompute-moe": ({**RECOMPUTE, **SHARED, "recompute_modules": ["moe"]}, {}),
    "recompute-act": ({**RECOMPUTE, "recompute_modules": ["moe_act"]}, {}),
    "recompute-shared": ({**RECOMPUTE, **SHARED, "recompute_modules": ["shared_experts"]}, {}),
    "recompute-shared-gate": (
        {
            **RECOMPUTE,
            **SHARED,
            "moe_shared_expert_gate": True,
            "recompute_modules": ["shared_experts"],
        },
        {},
    ),
    "micro-batches": (SHARED, {"steps": 3}),
    "one-token": (SHARED, {"tokens": 1}),
    "uneven-ranks": (SHARED, {"tokens": (5, 12)}),
    "few-tokens": (SHARED, {"tokens": (1, 7)}),
    "padding-mask": ({**AUX, "moe_router_load_balancing_type": "aux_loss"}, {"masked": True}),
}


@pytest.mark.weekly_cases("local")
@pytest.mark.parametrize("spec", ["te", pytest.param("local", marks=pytest.mark.slow)])
def test_options_of_the_layer(ranks, spec):
    cases = list(LAYERS.values())
    for found in ranks(2, jobs.compare_each, spec, {"expert": 2}, cases, VARIANTS, setup=ADAPTOR):
        for name, results in zip(LAYERS, found, strict=True):
            try:
                check(*results, relative=1e-6)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def test_recomputed_shared_experts_keep_nothing_of_their_inside(ranks):
    """The first half is computed again: fc1 and the activation, [128, 3 f], are not kept."""
    sizes = {"hidden_size": 64, "moe_ffn_hidden_size": 128, "bias_activation_fusion": True}
    whole = {**sizes, "moe_shared_expert_intermediate_size": 96}
    recomputed = {**whole, **RECOMPUTE, "recompute_modules": ["shared_experts"]}
    kept = [
        ranks(2, saved_bytes, "te", {"expert": 2}, config, [{"overlap": True}], 128, setup=ADAPTOR)
        for config in (whole, recomputed)
    ]
    for (everything,), (less,) in zip(*([found[0] for found in one] for one in kept), strict=True):
        assert everything - less == 128 * 3 * 96 * 4


def test_without_sequence_parallelism_ranks_evaluate_the_same_tokens(ranks):
    cases = [({**SHARED, "sequence_parallel": False}, {"training": False, "same": True})]
    layout = {"tensor": 2}
    found = ranks(2, jobs.compare_each, "te", layout, cases, VARIANTS, setup=ADAPTOR)
    for (results,) in found:
        check(*results, relative=1e-6)
    (first,), (second,) = found
    assert first[-1].output.equal(second[-1].output)
