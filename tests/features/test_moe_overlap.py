"""What hides the experts' collectives is refused where it would hide nothing, or cannot."""

from __future__ import annotations

import pytest

from mindspeed.features.experts.moe_overlap import ASYNC, OVERLAP, MoeOverlap

LAYER = {
    "num_experts": 8,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "cuda_graph_impl": "none",
}
TENSOR = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": None}
GRAPHS = {"cuda_graph_impl": "transformer_engine"}


def said(options, change):
    return "\n".join(map(str, options.problems(LAYER | change)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_experts": None}, "add --num-experts"),
        ({"moe_token_dispatcher_type": "flex"}, "the dispatcher is flex"),
        ({"expert_model_parallel_size": 1}, "nothing is sent to experts"),
        (TENSOR, "add --sequence-parallel"),
        ({"moe_shared_expert_overlap": True}, "remove --moe-shared-expert-overlap"),
        (GRAPHS | {"cuda_graph_scope": []}, "CUDA graph"),
        (GRAPHS | {"cuda_graph_scope": ["attn", "moe_router"]}, "CUDA graph"),
    ],
)
def test_refused(change, expected):
    for name, options in {
        ASYNC: MoeOverlap(moe_permutation_async_comm=True),
        OVERLAP: MoeOverlap(moe_alltoall_overlap_comm=True),
    }.items():
        text = said(options, change)
        assert text.startswith(name)
        assert expected in text


def test_the_dispatcher_of_each_flag():
    allgather = {"moe_token_dispatcher_type": "allgather"}
    both = MoeOverlap(True, True)
    assert "add --moe-token-dispatcher-type alltoall" in said(both, allgather)
    assert not said(MoeOverlap(moe_permutation_async_comm=True), allgather)


def test_deepspeed_layers_exchange_no_counts():
    deepspeed = {"moe_model_type": "deepspeed_moe"}
    assert "no counts" in said(MoeOverlap(moe_permutation_async_comm=True), deepspeed)
    counted = {**deepspeed, "moe_no_drop": True}
    assert not said(MoeOverlap(moe_permutation_async_comm=True), counted)
    assert not said(MoeOverlap(moe_alltoall_overlap_comm=True), deepspeed)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"expert_model_parallel_size": 1, **TENSOR, "sequence_parallel": True},
        GRAPHS | {"cuda_graph_scope": ["attn"]},
    ],
)
def test_accepted(change):
    assert not said(MoeOverlap(True, True), change)


def test_a_frameworks_configuration_is_checked_with_its_model():
    assert not list(MoeOverlap(True, True).problems({}))
