"""A model with fused token permutation computes the same as without."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from tests.features import fused_ranks, moe_ranks
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
ON = {"use_fused_moe_token_permute_and_unpermute": True}
DISPATCHERS = {
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "alltoall-capacity": {
        "moe_token_dispatcher_type": "alltoall",
        "moe_expert_capacity_factor": 0.75,
    },
    "alltoall-padded": {
        "moe_token_dispatcher_type": "alltoall",
        "moe_expert_capacity_factor": 0.75,
        "moe_pad_expert_input_to_capacity": True,
    },
}


@pytest.mark.weekly_cases("*-one-rank")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("world_size", [1, 2], ids=["one-rank", "ep"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_losses_and_gradients_are_equal(ranks, dispatcher, world_size):
    arguments = (ON, DISPATCHERS[dispatcher], "te")
    for (_, fused), (_, plain) in ranks(
        world_size, moe_ranks.with_and_without, *arguments, setup=ADAPTOR, timeout=240
    ):
        fused_ranks.assert_equal(fused.tensors, plain.tensors, 2e-6)
        assert fused.ops["mindspeed::moe_permute"] >= 2 and fused.ops["mindspeed::moe_unpermute"]
        assert not plain.ops["mindspeed::moe_permute"]


def test_the_local_spec_and_megatrons_own_flag(ranks):
    arguments = ({"moe_permute_fusion": True}, DISPATCHERS["alltoall"], "local")
    for (_, fused), (_, plain) in ranks(
        1, moe_ranks.with_and_without, *arguments, setup=ADAPTOR, timeout=240
    ):
        fused_ranks.assert_equal(fused.tensors, plain.tensors, 2e-6)
        assert fused.ops["mindspeed::moe_permute"]


def test_flag():
    names = lambda values: [f.name for f in resolve(values, "cpu").enabled]  # noqa: E731
    assert names(ON | {"num_experts": 8}) == ["fused-moe-permute"]
    assert names({"moe_permute_fusion": True}) == ["fused-moe-permute"]
    assert not names({"num_experts": 8})
    assert not names({"moe_permute_fusion": True, "optimization_level": 0})
    with pytest.raises(ConfigError, match=r"permute-and-unpermute: .*no experts"):
        resolve(ON | {"num_experts": None}, "cpu")
    with pytest.raises(ConfigError, match="--optimization-level >= 1"):
        resolve(ON | {"optimization_level": 0}, "cpu")
