"""``--moe-tp-extend-ep`` and ``--n-shared-experts`` are layouts and widths of Megatron's own."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from mindspeed.features.experts.moe_tp_extend_ep import given_expert_parallel_size
from tests.moe import layout_ranks as jobs
from tests.support.lazy import needs

needs("megatron.core")

WARM = "tests.support.warm"
EXTENDED = {
    "moe_tp_extend_ep": True,
    "num_experts": 8,
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": None,
    "pipeline_model_parallel_size": 1,
    "world_size": 4,
    "sequence_parallel": True,
}


def test_the_groups_of_tensor_and_expert_parallelism_become_one():
    values = EXTENDED | registry.derived(EXTENDED)
    assert values["expert_model_parallel_size"] == 4
    assert values["expert_tensor_parallel_size"] == 1
    assert given_expert_parallel_size(values) == 2
    assert values | registry.derived(values) == values  # asked again, as it is
    registry.resolve(values, "cpu")
    assert registry.derived(EXTENDED | {"optimization_level": 1}) == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": None}, "add --num-experts"),
        ({"num_experts": 6}, "--num-experts 6 .* tensor 2 x expert 2 = 4 ranks"),
        ({"expert_tensor_parallel_size": 2}, "--expert-tensor-parallel-size 2 cuts them"),
        ({"world_size": 6}, "6 ranks cannot be divided by tensor 2 x expert 2 x pipeline 1 = 4"),
    ],
)
def test_sizes_that_cannot_be_extended(change, said):
    with pytest.raises(ConfigError, match=f"--moe-tp-extend-ep.*{said}"):
        registry.derived(EXTENDED | change)


@pytest.mark.parametrize(
    ("tp", "ep", "fewer"), [(2, 2, 2), (4, 2, 4), (8, 4, 8)], ids=["2x2", "4x2", "8x4"]
)
def test_bytes_by_the_formulas(tp, ep, fewer):
    sliced = (ep - 1) / ep + (tp - 1)
    whole = (tp * ep - 1) / (tp * ep)
    assert sliced / whole == pytest.approx(fewer)


def test_half_of_the_bytes_of_sliced_experts(ranks):
    """Tensor 2, expert 2, every expert with as many tokens: 2 times fewer bytes, by the ledger."""
    for sliced, whole in ranks(4, jobs.bytes_of_layouts, setup=WARM):
        assert sliced["bytes"] == 2 * whole["bytes"]
        assert sliced["calls"] - whole["calls"] == 6  # gathers of tokens and probabilities, ...


SHARED = {"n_shared_experts": 2, "num_experts": 8, "moe_ffn_hidden_size": 24, "hidden_size": 16}
WIDTH = "moe_shared_expert_intermediate_size"


@pytest.mark.parametrize(
    ("change", "width"),
    [
        ({}, 48),
        ({"moe_ffn_hidden_size": None, "ffn_hidden_size": 40}, 80),
        ({"moe_ffn_hidden_size": None}, 128),
        ({"moe_ffn_hidden_size": None, "hidden_size": 96, "swiglu": True}, 512),
        ({WIDTH: 48}, 48),
    ],
)
def test_the_width_of_shared_experts(change, width):
    values = SHARED | change
    assert registry.derived(values)[WIDTH] == width
    registry.resolve(values | {WIDTH: width}, "cpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": None}, "add --num-experts"),
        ({WIDTH: 50}, "a width of 48 .* --moe-shared-expert-intermediate-size is 50; remove one"),
        ({"n_shared_experts": 0}, "--n-shared-experts"),
    ],
)
def test_numbers_that_are_none(change, said):
    with pytest.raises(ConfigError, match=said):
        registry.derived(SHARED | change)


@pytest.mark.parametrize("tensor", [1, 2])
def test_one_wide_mlp_is_the_sum_of_as_many_experts(ranks, tensor):
    """Outputs and gradients of the input in fp64, at 1e-12."""
    for apart in ranks(tensor, jobs.shared_against_single_experts, tensor, 3, setup=WARM):
        assert max(apart) < 1e-12
