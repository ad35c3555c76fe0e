"""Experts in groups: the bits of all together, with 2 of 2 D collectives exposed."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from tests.moe import layer_ranks as jobs
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
SLICED = {"tensor": 2, "expert_tensor": 2}
SHARED = {"moe_shared_expert_intermediate_size": 20}
VARIANTS = [{}, *({"expert_groups": d, "overlap": o} for d in (2, 4) for o in (False, True))]


def check(results):
    """Bits of the program without groups; Megatron's own layer at 2e-6."""
    megatrons, whole, *grouped = results
    for result in grouped:
        assert result.output.equal(whole.output)
        torch.testing.assert_close(result.output, megatrons.output, rtol=2e-6, atol=2e-6)
        assert result.gradients.keys() == whole.gradients.keys() == megatrons.gradients.keys()
        for name, gradient in whole.gradients.items():
            assert result.gradients[name].equal(gradient), name
            torch.testing.assert_close(gradient, megatrons.gradients[name], rtol=2e-6, atol=2e-6)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("layout", [SLICED, SLICED | {"expert": 2}], ids=["tensor", "both"])
def test_groups_compute_the_same_bits(ranks, spec, layout):
    count = 2 * layout.get("expert", 1)
    for results in ranks(count, jobs.compare, spec, layout, SHARED, VARIANTS, setup=ADAPTOR):
        check(results)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_all_but_the_first_gather_and_the_last_sum_are_hidden(ranks, count):
    variants = [{"expert_groups": count}]
    for _, grouped in ranks(
        4, jobs.compare, "te", SLICED | {"expert": 2}, {}, variants, setup=ADAPTOR
    ):
        for phase, alone in (
            ("forward", [("gather.rows", 0), ("scatter.rows", count - 1)]),
            ("backward", [("scatter.rows", count - 1), ("gather.rows", 0)]),
        ):
            ours = [
                event
                for event in grouped.log.communications(phase)
                if event.name in ("gather.rows", "scatter.rows")
            ]
            assert len(ours) == 2 * count
            exposed = [(event.name, event.chunk) for event in grouped.log.exposed(phase)]
            assert [one for one in exposed if one in {(e.name, e.chunk) for e in ours}] == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, {"tokens": 2}),
        ({"moe_router_topk": 3}, {"steps": 2}),
        ({"moe_grouped_gemm": False}, {}),
        ({}, {"frozen": "linear_fc1"}),
        ({"moe_expert_capacity_factor": 0.5}, {}),
        ({"params_dtype": torch.bfloat16, "bf16": True}, {}),
    ],
    ids=["empty experts", "two steps", "sequential", "frozen", "dropped", "bf16"],
)
def test_other_layers(ranks, overrides, options):
    given = (options, "te", SLICED, overrides, VARIANTS)
    for megatrons, whole, *grouped in ranks(2, jobs.compare_with, *given, setup=ADAPTOR):
        assert whole.gradients.keys() == megatrons.gradients.keys()
        for result in grouped:
            assert result.output.equal(whole.output)
            for name, gradient in whole.gradients.items():
                assert result.gradients[name].equal(gradient), name


ON = {
    "moe_experts_pipeline_degree": 2,
    "num_experts": 12,
    "tensor_model_parallel_size": 2,
    "expert_tensor_parallel_size": 2,
    "expert_model_parallel_size": 2,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": None}, "add --num-experts"),
        ({"moe_experts_pipeline_degree": 1}, "the 6 experts of a rank .*; allowed: 2, 3, 6"),
        ({"moe_experts_pipeline_degree": 4}, "the 6 experts of a rank .*; allowed: 2, 3, 6"),
        ({"expert_model_parallel_size": 12}, "the 1 experts of a rank .*; allowed: none"),
        ({"expert_tensor_parallel_size": 1}, "expert tensor parallel size is 1, "),
        (
            {"expert_tensor_parallel_size": 1, "moe_tp_extend_ep": True, "world_size": 4},
            "--moe-tp-extend-ep makes it so",
        ),
        ({"moe_token_dispatcher_type": "allgather"}, "add --moe-token-dispatcher-type alltoall"),
    ],
)
def test_degrees_that_are_none(change, said):
    registry.resolve(ON, "cpu")
    with pytest.raises(ConfigError, match=f"--moe-experts-pipeline-degree .*{said}"):
        registry.resolve(ON | change, "cpu")
