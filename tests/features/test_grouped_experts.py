"""Grouped experts compute what sequential ones do; weight gradients reach main_grad."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from mindspeed.te.fused_experts import as_one
from tests.features import fused_ranks, moe_ranks
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
ON = {"moe_grouped_gemm": True}
FUSION = {"gradient_accumulation_fusion": True}
SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
PRE_SOFTMAX = {"moe_router_pre_softmax": True}  # Megatron demands it of one expert
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("experts", "world_size"), [(1, 1), (2, 1), (8, 1), (4, 2)])
@pytest.mark.parametrize("spec", ["te", "local"])
def test_twenty_steps_equal_those_of_sequential_experts(ranks, spec, experts, world_size):
    overrides = {"num_moe_experts": experts, "moe_router_topk": min(experts, 2), **PRE_SOFTMAX}
    arguments = (ON, ON | ALLTOALL | overrides, spec, {"moe_grouped_gemm": False}, 20)
    for (losses, grouped), (expected, sequential) in ranks(
        world_size, moe_ranks.with_and_without, *arguments, setup=ADAPTOR, timeout=300
    ):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert losses[-1] < 0.9 * losses[0]
        fused_ranks.assert_equal(grouped.tensors, sequential.tensors, 1e-4)
        layers = 2
        assert grouped.ops["mindspeed::grouped_matmul"] == layers * (2 + 2)
        assert grouped.ops["mindspeed::grouped_outer"] == layers * 2
        assert not sequential.ops["mindspeed::grouped_matmul"]


@pytest.mark.parametrize("sizes", [[3, 0, 5], [9], [0, 0], [1, 2, 3, 4, 0, 5, 6, 7]])
@pytest.mark.parametrize("options", [{}, SWIGLU], ids=["gelu", "swiglu"])
@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["keep", "recompute"])
def test_experts_of_the_local_spec_in_fp32(ranks, sizes, options, recompute):
    arguments = (sizes, options, recompute)
    ((grouped, sequential),) = ranks(
        1, moe_ranks.grouped_and_sequential_experts, *arguments, setup=ADAPTOR, timeout=120
    )
    for actual, expected in zip(grouped, sequential, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "sequential"])
def test_weight_gradients_are_added_to_main_grad(ranks, grouped, spec, dtype):
    precision = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    overrides = ALLTOALL | FUSION | precision | {"moe_grouped_gemm": grouped}
    flags = FUSION | {"moe_grouped_gemm": grouped}
    unfused = {"gradient_accumulation_fusion": False}
    ((_, fused), (_, plain)) = ranks(
        1, moe_ranks.with_and_without, flags, overrides, spec, unfused, setup=ADAPTOR, timeout=240
    )[0]
    fused_ranks.assert_equal(fused.tensors, plain.tensors, 2e-6 if dtype.itemsize == 4 else 2e-2)
    dense = 2 * 2 + 1  # two layers with two dense linears each, and the output layer
    assert fused.ops["mindspeed::matmul_add"] == dense + (
        0 if grouped and spec == "local" else 2 * 4 * 2
    )
    # Here, as with the distributed optimizer, the buffers of separate weights are not one tensor.
    assert fused.ops["mindspeed::groupmatmul_add"] == (2 * 2 if grouped and spec == "local" else 0)


@pytest.mark.parametrize("spec", ["te", "local"])
def test_weight_gradients_with_tensor_and_sequence_parallelism(ranks, spec):
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    overrides = ALLTOALL | FUSION | parallel | ON | {"expert_tensor_parallel_size": 1}
    unfused = {"gradient_accumulation_fusion": False}
    arguments = (FUSION | ON, overrides, spec, unfused)
    for (_, fused), (_, plain) in ranks(
        2, moe_ranks.with_and_without, *arguments, setup=ADAPTOR, timeout=240
    ):
        fused_ranks.assert_equal(fused.tensors, plain.tensors, 2e-6)
        assert fused.ops["mindspeed::matmul_add"] and not plain.ops["mindspeed::matmul_add"]


def test_adjacent_expert_weights_are_viewed_as_one_tensor():
    whole = torch.arange(24.0).view(4, 2, 3)
    parts = list(whole.unbind(0))
    assert torch.equal(as_one(parts), whole)
    assert as_one(parts).data_ptr() == whole.data_ptr()
    assert torch.equal(as_one(parts[1:3]), whole[1:3])
    assert as_one(parts[::-1]) is None
    assert as_one([parts[0], parts[2]]) is None
    assert as_one([parts[0], parts[1].clone()]) is None
    assert as_one([p.t() for p in parts]) is None


def test_flags():
    names = lambda values: {f.name for f in resolve(values, "cpu").enabled}  # noqa: E731
    assert names(ON | FUSION) == {"grouped-experts", "fused-wgrad"}
    assert not names(ON | FUSION | {"optimization_level": 0})
    assert not names({"gradient_accumulation_fusion": False})
    both = {"gemm_gradient_accumulation_fusion": True}
    assert names(ON | FUSION | both) == {"grouped-experts", "fused-wgrad"}
    with pytest.raises(ConfigError, match=r"not grouped; add --moe-grouped-gemm\n.*fusion is off"):
        resolve(both, "cpu")
