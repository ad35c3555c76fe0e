"""The all-gather dispatcher as a program: equal to Megatron's, its gathers hidden, fewer bytes."""

from __future__ import annotations

import pytest
import torch

from mindspeed.features.experts.moe_allgather_overlap import MoeAllgatherOverlap
from tests.moe import dispatch_ranks as jobs
from tests.moe.dispatch_ranks import Case
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
GATHER = {"moe_token_dispatcher_type": "allgather"}
ONE = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
SHARED = {"moe_shared_expert_intermediate_size": 20}
VARIANTS = [{}, {"async_permutation": True}, {"overlap": True}]
OPTIONS = ("tokens", "steps", "masked")
MASKED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
EP, TP_EP, ETP = {"expert": 2}, {"tensor": 2, "expert": 4}, {"tensor": 2, "expert_tensor": 2}
FOUR, HALF = {"expert": 4}, {"params_dtype": torch.bfloat16}


def case(name, layout=EP, *, spec="te", experts=None, **overrides):
    own = {name: overrides.pop(name) for name in ("frozen", "fused") if name in overrides}
    options = {name: overrides.pop(name) for name in OPTIONS if name in overrides}
    return Case(name, layout, GATHER | overrides, VARIANTS, spec, experts, options=options, **own)


TWO = [
    case("routed"),
    case("shared", **SHARED),
    case("local routed", spec="local"),
    case("local shared", spec="local", **SHARED),
    case("top 1", **ONE),
    case("one local expert", num_moe_experts=2),
    case("a rank without rows", experts=4),
    case("all to one expert", experts=1, **ONE),
    case("one token", tokens=1),
    case("fewer experts by capacity", moe_expert_capacity_factor=0.5),
    case("capacity by position", moe_expert_capacity_factor=0.5, moe_token_drop_policy="position"),
    case(
        "padded to capacity",
        moe_expert_capacity_factor=1.0,
        moe_pad_expert_input_to_capacity=True,
    ),
    case("sinkhorn", moe_router_load_balancing_type="sinkhorn"),
    case("groups of experts", moe_router_num_groups=4, moe_router_group_topk=2),
    case(
        "expert bias",
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    ),
    case("fp32 router", moe_router_dtype="fp32"),
    case("padding tokens", masked=True, **MASKED),
    case("frozen experts", frozen=True),
    case("two micro-batches", steps=2, **SHARED),
    case("two slices", ETP),
    case("two slices, shared", ETP, **SHARED),
]


QUICK = {
    *("shared", "local routed", "top 1", "a rank without rows", "fewer experts by capacity"),
    *("padded to capacity", "two slices, shared"),
}


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([one for one in TWO if one.name in QUICK], id="quick"),
        pytest.param(
            [one for one in TWO if one.name not in QUICK], id="others", marks=pytest.mark.slow
        ),
    ],
)
def test_programs_equal_megatrons_dispatcher(ranks, cases):
    for figures in ranks(2, jobs.compare_all, cases, setup=ADAPTOR):
        assert len(figures) == len(cases) * len(VARIANTS)
        for one in figures:
            assert one.output == 0, one
            assert one.gradients <= 1e-6, one


@pytest.mark.slow
def test_programs_equal_megatrons_dispatcher_on_four_ranks(ranks):
    cases = [
        case("tp 2, ep 4, shared", TP_EP, **SHARED),
        case("tp 2, ep 2 x etp 2", {"tensor": 2, "expert": 2, "expert_tensor": 2}, **SHARED),
        # Results of four ranks are added in the dtype of the probabilities.
        case(
            "fp32 router",
            {"expert": 4},
            moe_router_dtype="fp32",
            moe_router_topk=6,
            tokens=64,
            **HALF,
        ),
    ]
    for figures in ranks(4, jobs.compare_all, cases, setup=ADAPTOR):
        for one in figures:
            assert one.output == 0, one
            assert one.gradients <= (1e-2 if one.name == "fp32 router" else 1e-6), one


def test_one_kernel_each_way_gives_the_same(ranks):
    cases = [case("one kernel each way", fused=True)]
    for figures in ranks(2, jobs.compare_all, cases, setup=ADAPTOR):
        for one in figures:
            assert one.output <= 1e-6, one
            assert one.gradients <= 1e-6, one


def test_bf16_equals_megatrons_dispatcher(ranks):
    cases = [case("bf16", **HALF), case("bf16, fp32 router", moe_router_dtype="fp32", **HALF)]
    for figures in ranks(2, jobs.compare_all, cases, setup=ADAPTOR):
        for one in figures:
            assert one.output == 0, one
            assert one.gradients <= 1e-2, one


FORWARD = "route compact ids.ids> weights.weights> tokens.rows>"


def test_what_hides_the_gathers(ranks):
    cases = [case("routed"), case("shared", **SHARED)]
    for figures in ranks(2, jobs.compare_all, cases, setup=ADAPTOR):
        serial, asynchronous, overlapped, *rest = figures
        assert serial.exposed == (4, 3)
        # Where the tokens of this rank's experts are is computed while the tokens travel.
        assert asynchronous.order[0] == (
            f"{FORWARD} ids.ids< locate weights.weights< tokens.rows< arrange experts disarrange "
            "combine.rows> combine.rows< finish"
        )
        assert asynchronous.exposed == (2, 3)
        assert overlapped.exposed == (2, 1)
        serial, asynchronous, overlapped = rest
        assert serial.exposed == (4, 3)
        assert overlapped.exposed == (0, 0)
        assert overlapped.collectives == (4, 3)
        assert overlapped.order == (
            f"{FORWARD} shared_fc1 ids.ids< locate weights.weights< tokens.rows< arrange experts "
            "disarrange combine.rows> shared_fc2 combine.rows< finish",
            "finish combine.rows> shared_fc2 combine.rows< disarrange experts arrange "
            "tokens.rows> weights.weights> weight_gradients shared_fc1 tokens.rows< "
            "weights.weights< compact route",
        )


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_by_the_ledger(ranks, size):
    tokens, k = 12, 2
    cases = [case("tp 2, ep 4", TP_EP)] if size == 4 else [case("fp32"), case("bf16", **HALF)]
    for figures in ranks(size, jobs.compare_all, cases, setup=ADAPTOR):
        for one in figures:
            element = 2 if one.name == "bf16" else 4
            rows = tokens * jobs.layer_ranks.HIDDEN * element * (size - 1)
            forward, backward = one.sent
            (_, ids), (_, weights), *others = forward
            assert ids + weights == tokens * k * (2 + element) * (size - 1)  # int16 ids
            assert others == [("all_gather", rows), ("reduce_scatter", rows)]
            assert sum(sent for _, sent in backward) == 2 * rows + weights


FLAGS = {
    "moe_allgather_overlap_comm": True,
    "num_experts": 8,
    "moe_token_dispatcher_type": "allgather",
    "expert_model_parallel_size": 2,
    "tensor_model_parallel_size": 1,
    "sequence_parallel": True,
    "world_size": 2,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": None}, "add --num-experts"),
        ({"moe_token_dispatcher_type": "alltoall"}, "the dispatcher is alltoall"),
        ({"moe_alltoall_overlap_comm": True}, "are for different dispatchers"),
        ({"sequence_parallel": False, "tensor_model_parallel_size": 2}, "add --sequence-parallel"),
        ({"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
        ({"moe_model_type": "deepspeed_moe"}, "--moe-model-type deepspeed_moe"),
        ({"expert_model_parallel_size": 1}, "nothing is sent to experts"),
    ],
)
def test_flags_that_do_not_fit(changes, said):
    feature = MoeAllgatherOverlap(moe_allgather_overlap_comm=True)
    assert list(feature.problems(FLAGS)) == []
    problems = list(feature.problems(FLAGS | changes))
    assert any(said in str(problem) for problem in problems)
    assert all(str(problem).startswith("--moe-allgather-overlap-comm") for problem in problems)
