"""Latent experts, and shared experts with a gate: every program equals Megatron's layer."""

from __future__ import annotations

import pytest

from mindspeed.moe.device_bound import DeviceBound
from mindspeed.moe.save.policy import LEVEL0, LEVEL1
from tests.moe import dispatch_ranks as jobs
from tests.moe.dispatch_ranks import Case
from tests.support.lazy import needs

needs("megatron.core")

OVERLAP = {"overlap": True}
PROGRAMS = [
    {},
    {"async_permutation": True},
    OVERLAP,
    OVERLAP | {"save": LEVEL0},
    OVERLAP | {"save": LEVEL1},
    {"exchange": "dedup"},
    OVERLAP | {"exchange": "dedup"},
    {"pipe_slices": 2},
    {"hot_experts": 2, "dropped": True},
    OVERLAP | {"exchange": "device", "bound": DeviceBound(4.0)},
]
GATHERED = [{}, {"async_permutation": True}, OVERLAP, OVERLAP | {"save": LEVEL1}]
GATE = {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True}
LATENT = {"moe_latent_size": 8} | GATE
SLICED = {"expert": 1, "tensor": 2, "expert_tensor": 2}
TWO = [
    Case("latent", {"expert": 2}, LATENT, PROGRAMS),
    Case("gate", {"expert": 2}, GATE, PROGRAMS),
    Case(
        "all-gather", {"expert": 2}, LATENT | {"moe_token_dispatcher_type": "allgather"}, GATHERED
    ),
    Case("slices", SLICED, LATENT, [{}, OVERLAP, {"expert_groups": 2}]),
]
FOUR = [
    Case(
        "nodes", {"expert": 4}, LATENT,
        [{"exchange": "hierarchical"}, OVERLAP | {"exchange": "hierarchical", "save": LEVEL0}],
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("cases", "size"),
    [(TWO, 2), pytest.param(FOUR, 4, marks=pytest.mark.slow)],
    ids=["two", "four"],
)
def test_programs_equal_megatrons_layer(ranks, cases, size):
    for results in ranks(size, jobs.compare_all, cases, setup="tests.support.warm", timeout=300):
        for found in results:
            where = found.name, found.variant
            assert found.output < 2e-6, where
            assert found.gradients < 1e-5, where
