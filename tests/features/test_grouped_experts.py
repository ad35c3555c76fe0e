"""Grouped experts compute what sequential ones do; weight gradients reach main_grad."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from mindspeed.te import fused_experts, kernels
from mindspeed.te.fused_experts import runs
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


@pytest.mark.weekly_cases("te-2-1", "te-8-1", "local-1-1", "local-4-2", "local-8-1", "local-2-1")
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


@pytest.mark.quick_cases(4)
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


@pytest.mark.quick_cases(4)
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


@pytest.mark.slow
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

    def found(tensors, rows=0):
        splits = [rows, *[0] * (len(tensors) - 1)]
        return [(r.first, r.count, r.matrices, r.backwards) for r in runs(tensors, splits, 1)]

    ((first, count, matrices, backwards),) = found(parts, rows=1000)
    assert (first, count, backwards) == (0, 4, False)
    assert torch.equal(matrices, whole) and matrices.data_ptr() == whole.data_ptr()
    assert torch.equal(found(parts[1:3])[0][2], whole[1:3])
    ((first, count, matrices, backwards),) = found(parts[::-1])
    assert (first, count, backwards) == (0, 4, True) and torch.equal(matrices, whole)
    assert found(parts[::-1], rows=3)[0][3]  # 24 elements, of which a fourth is 3 x 2
    assert found(parts[::-1], rows=4) == [(0, 4, None, False)]
    assert found([parts[0], parts[2]]) == [(0, 2, None, False)]
    assert found([parts[0], parts[1].clone()]) == [(0, 2, None, False)]
    assert found([p.t() for p in parts]) == [(0, 4, None, False)]
    mixed = found([parts[3], parts[2], parts[0], parts[1], parts[0]])
    assert [(r[0], r[1], r[3]) for r in mixed] == [(0, 2, True), (2, 2, False), (4, 1, False)]


SPLITS = [3, 0, 5, 2, 0, 4]
ORDERS = {
    "backwards": [5, 4, 3, 2, 1, 0],
    "two buckets": [5, 4, 3, 8, 7, 6],
    "forwards and back": [0, 1, 2, 8, 7, 6],
    "apart": [0, 2, 4, 6, 8, 5],
}
LAUNCHES = {"backwards": 1, "two buckets": 2, "forwards and back": 2, "apart": 0}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products_of_weights_in_any_order_of_memory(order, dtype):
    """Products of matrices one by one, with a launch for each line of them."""
    generator = torch.Generator().manual_seed(1)
    weights = list(torch.randn(9, 64, 80, generator=generator, dtype=dtype))
    weights = [weights[i] for i in ORDERS[order]]
    x, y = (torch.randn(sum(SPLITS), n, generator=generator, dtype=dtype) for n in (80, 64))
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 2e-5}
    with fused_ranks._Count() as count:
        for rows, transposed in ((x, True), (y, False)):
            torch.testing.assert_close(
                fused_experts.grouped_matmul(rows, weights, SPLITS, transposed),
                kernels.grouped_matmul(rows, weights, SPLITS, transposed),
                **tolerance,
            )
    assert count.ops["mindspeed::grouped_matmul"] == 2 * LAUNCHES[order]
    if dtype == torch.float64:
        return
    sums = list(torch.ones(9, 64, 80).unbind(0))
    expected = [torch.ones(64, 80) for _ in SPLITS]
    with fused_ranks._Count() as count:
        ours = [sums[i] for i in ORDERS[order]]
        fused_experts.accumulate_grouped_wgrad(y, x, SPLITS, ours)
    kernels.accumulate_grouped_wgrad(y, x, SPLITS, expected)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)
    assert count.ops["mindspeed::groupmatmul_add"] == LAUNCHES[order]


def test_flags():
    names = lambda values: {f.name for f in resolve(values, "cpu").enabled}  # noqa: E731
    assert names(ON | FUSION) == {"grouped-experts", "fused-wgrad"}
    assert not names(ON | FUSION | {"optimization_level": 0})
    assert not names({"gradient_accumulation_fusion": False})
    both = {"gemm_gradient_accumulation_fusion": True}
    assert names(ON | FUSION | both) == {"grouped-experts", "fused-wgrad"}
    with pytest.raises(ConfigError, match=r"not grouped; add --moe-grouped-gemm\n.*fusion is off"):
        resolve(both, "cpu")
