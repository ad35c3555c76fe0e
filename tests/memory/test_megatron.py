"""Plans on GPT models of Megatron: both layer specs, experts, latent attention, TP with SP."""

from __future__ import annotations

import pytest

from tests.memory import memory_ranks
from tests.support.lazy import needs

needs("megatron.core")

SETUP = "tests.support.warm"
PLANS = {
    "layer": {"layer": "recompute"},
    "norms": {"input_layernorm": "recompute_output", "pre_mlp_layernorm": "recompute_output"},
    "activation": {
        "mlp.activation": "recompute_output",
        "mlp.experts.activation": "recompute_output",
    },
    "attention": {"self_attention": "recompute"},
    "core attention": {"self_attention.core_attention": "recompute"},
    "mlp": {"mlp": "recompute"},
    "norms, activation, core attention": {
        "input_layernorm": "recompute_output",
        "pre_mlp_layernorm": "recompute_output",
        "mlp.activation": "recompute_output",
        "self_attention.core_attention": "recompute",
    },
    "mlp and its activation": {"mlp": "recompute", "mlp.activation": "recompute_output"},
    "activation and the linear layers around it": {
        "mlp.linear_fc1": "offload",
        "mlp.activation": "recompute_output",
        "mlp.linear_fc2": "recompute",
    },
    "swapped attention": {"self_attention": "offload"},
    "swapped attention, mlp": {"self_attention": "offload", "mlp": "recompute"},
    "everything on the host": {"layer": "offload", "input_layernorm": "recompute_output"},
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MOE = {
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "aux_loss",
}
CASES = [
    ("rmsnorm-swiglu-gqa", "te", 1, {}),
    ("rmsnorm-swiglu-gqa", "local", 1, DROPOUT),
    ("layernorm-gelu-bias", "te", 2, {"sequence_parallel": True, **DROPOUT}),
    ("layernorm-gelu-bias", "local", 2, {}),
    ("mla", "te", 1, {}),
    ("moe-grouped", "te", 1, MOE),
    ("moe-sequential", "local", 1, MOE),
]


@pytest.mark.weekly_cases("layernorm-gelu-bias-local-2-overrides3")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "spec", "size", "overrides"), CASES)
def test_every_plan_gives_the_same_losses_gradients_and_random_states(
    ranks, name, spec, size, overrides
):
    for found in ranks(
        size, memory_ranks.under_plans, name, spec, PLANS, overrides, setup=SETUP, timeout=240
    ):
        assert found["again"] == []
        (plain, *_) = found["no plan"]
        for title in PLANS:
            kept, _, _, after, host_after = found[title]["bytes"]
            assert found[title]["differ"] == [], title
            absent = title.startswith("activation") and name.startswith("moe")
            assert found[title]["planned"] or absent, title
            # Attention keeps no scores: its inputs are what it saves.
            assert kept < plain or title == "core attention" or not found[title]["planned"], title
            assert (after, host_after) == (0, 0), title


OVERLAPPED = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_intermediate_size": 20,
    "moe_shared_expert_overlap": True,
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (1, {"moe_token_dispatcher_type": "alltoall"}),
        (1, OVERLAPPED),
        (1, {**OVERLAPPED, "moe_shared_expert_gate": True}),
        pytest.param(2, {**OVERLAPPED, "sequence_parallel": True}, marks=pytest.mark.slow),
    ],
    ids=["experts", "shared", "gate", "tp2-sp"],
)
def test_a_second_run_leaves_nothing_in_modules(ranks, size, overrides, dropout):
    """Megatron's dispatchers and overlapped shared experts pass tensors on in attributes.

    Without dropout backward needs nothing that is computed after the shared experts, so a second
    run ends within them.
    """
    plans = {name: PLANS[name] for name in ("layer", "mlp")}
    options = {**overrides, "hidden_dropout": dropout}
    for found in ranks(
        size, memory_ranks.under_plans, "moe-grouped", "te", plans, options, setup=SETUP
    ):
        for title in plans:
            assert (found[title]["differ"], found[title]["alive"]) == ([], []), title


@pytest.mark.weekly_cases(
    "mla-te-1-overrides2",
    "rmsnorm-swiglu-gqa-local-1-overrides0",
    "moe-sequential-local-1-overrides4",
)
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "spec", "size", "overrides"), [CASES[1], CASES[2], CASES[4], CASES[5], CASES[6]]
)
def test_random_plans_change_nothing(ranks, name, spec, size, overrides):
    """Dense, latent attention and experts; installed in two parts, as two flags would do it."""
    plans = 40
    given = (memory_ranks.under_random_plans, name, spec, overrides, plans, 11)
    for found in ranks(size, *given, setup=SETUP, timeout=300):
        assert {plan: names for plan, names in found.items() if names} == {}
