"""Save policies: less is kept for backward, and nothing else changes, not one bit."""

from __future__ import annotations

import pytest
import torch

from mindspeed.moe.save.policy import ACT, ALL, LEVEL0, LEVEL1, X_ONLY, load
from tests.moe import save_ranks as jobs
from tests.moe.dispatch_ranks import Case
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
POLICIES = {"act": ACT, "x_only": X_ONLY, "level0": LEVEL0, "level1": LEVEL1}
REQUESTS = [{"save": policy} for policy in POLICIES.values()]
SHARED = {"moe_shared_expert_intermediate_size": 20}
GATE = SHARED | {"moe_shared_expert_gate": True}
ONE = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
ONE_BY_ONE = {"moe_grouped_gemm": False}
SERIAL: dict[str, object] = {}
OVERLAP = {"overlap": True}
EP, TP_EP = {"expert": 2}, {"expert": 2, "tensor": 2}
ETP = {"expert": 2, "tensor": 2, "expert_tensor": 2}


def case(name, program=OVERLAP, layout=EP, *, spec="te", experts=None, options=None, **overrides):
    return Case(name, layout, overrides, [program], spec, experts, options or {})


TWO_RANKS = [
    case("grouped", **SHARED),
    case("grouped, serial", SERIAL, **SHARED),
    case("grouped, local spec", spec="local", **GATE),
    case("one by one", **ONE_BY_ONE),
    case("one by one, local spec", SERIAL, spec="local", **ONE_BY_ONE, **SHARED),
    case("fused activation", bias_activation_fusion=True),
    case("all-gather", moe_token_dispatcher_type="allgather", **SHARED),
    case("a rank without rows", experts=4, options={"frozen": ""}),
    case("one token and seven", options={"tokens": (1, 7)}),
    case("one token, top 1", options={"tokens": 1}, **ONE),
    case("one local expert", SERIAL, num_moe_experts=2),
    case("micro-batches", options={"steps": 3}),
    case("frozen experts", options={"frozen": r"experts\.linear"}),
]
MORE = [
    case("bf16", params_dtype=torch.bfloat16),
    case("fp64, probabilities apart", SERIAL, params_dtype=torch.float64),
    case("dropped", moe_expert_capacity_factor=0.6),
    case("padded", moe_expert_capacity_factor=0.6, moe_pad_expert_input_to_capacity=True),
    case("all-gather, serial", SERIAL, moe_token_dispatcher_type="allgather"),
    case("all-gather, a rank without rows", experts=4, moe_token_dispatcher_type="allgather"),
    case("deduplicated", OVERLAP | {"exchange": "dedup"}, **SHARED),
    case("deduplicated, serial", {"exchange": "dedup"}, spec="local"),
    case("frozen first layers", options={"frozen": r"experts.*fc1"}),
    case("frozen experts, local spec", spec="local", options={"frozen": r"\.experts"}),
    case("a frozen router", options={"frozen": "router"}),
    case("no gate", gated_linear_unit=False, activation_func=torch.nn.functional.gelu),
    case("squared relu, one by one", activation_func=torch.relu, **ONE_BY_ONE),
    case("uneven ranks", options={"tokens": (5, 12)}),
]
FOUR_RANKS = [
    case("tp 2, ep 2", layout=TP_EP, **SHARED),
    case("tp 2, ep 2, local spec, serial", SERIAL, TP_EP, spec="local", **SHARED),
    case("etp 2", layout=ETP, **SHARED),
    case("etp 2, serial, one by one", SERIAL, ETP, **ONE_BY_ONE),
    case("etp 2, all-gather", layout=ETP, moe_token_dispatcher_type="allgather"),
    case("hierarchical", OVERLAP | {"exchange": "hierarchical"}, {"expert": 4}, **SHARED),
    case("etp 2, a rank without rows", layout=ETP, experts=4),
]


def check(found):
    for one in found:
        assert not one.different, (one.name, one.policy, one.different)


@pytest.mark.slow
def test_policies_are_bit_equal(ranks):
    for found in ranks(2, jobs.compare_policies, TWO_RANKS, REQUESTS, setup=ADAPTOR):
        check(found)


def test_one_rank_has_nothing_to_communicate(ranks):
    alone = [
        case("one rank", layout={}, **SHARED),
        case("one rank, all-gather", SERIAL, {}, moe_token_dispatcher_type="allgather"),
    ]
    (found,) = ranks(1, jobs.compare_policies, alone, REQUESTS, setup=ADAPTOR)
    check(found)
    assert {one.collectives for one in found} == {(0, 0)}


@pytest.mark.parametrize(("stage", "first"), [(0, [[], [0], [0], [0, 1]]), (1, [[], [], [0], [0]])])
def test_level1_is_of_the_first_layers_of_a_stage(ranks, stage, first):
    """Two layers in each of two chunks of a rank: 0 of each chunk, then 1 of each."""
    assert ranks(1, jobs.first_layers, stage, 2, range(4), setup=ADAPTOR) == [first]


@pytest.mark.weekly_cases("4")
@pytest.mark.slow
@pytest.mark.parametrize(("size", "cases"), [(2, MORE), (4, FOUR_RANKS)], ids=["2", "4"])
def test_more_policies_are_bit_equal(ranks, size, cases):
    for found in ranks(size, jobs.compare_policies, cases, REQUESTS, setup=ADAPTOR):
        check(found)


def test_the_refetch_is_one_more_collective_and_hidden(ranks):
    """Level0: after the launch of combine. Level1: before it, and the product in its window."""
    policies = [{"save": policy} for policy in (ALL, LEVEL0, LEVEL1)]
    for found in ranks(
        2, jobs.compare_policies, [case("shared", **SHARED)], policies, setup=ADAPTOR
    ):
        everything, level0, level1 = found
        assert everything.collectives == (3, 2)  # counts, rows there and back; their gradients
        assert level0.collectives == level1.collectives == (3, 3)
        dispatch, _ = everything.sent[0]
        width, packed = 16 * 4, 80  # bytes of a row, and of one with its probability
        again = dispatch * width // packed
        combine, reverse = everything.sent[1]
        assert level0.sent == (everything.sent[0], [combine, again, reverse])
        assert level1.sent == (everything.sent[0], [again, combine, reverse])
        assert "combine.rows> refetch.rows> shared_fc2 combine.rows<" in level0.order
        assert "recompute refetch.rows< arrange dispatch.rows> weight_gradients" in level0.order
        assert (
            "refetch.rows> combine.rows> recompute_shared shared_fc2 refetch.rows< recompute "
            "combine.rows<"
        ) in level1.order
        assert "refetch" not in everything.order


SIZES = {"hidden_size": 64, "moe_ffn_hidden_size": 128, "bias_activation_fusion": True}
KEPT = {  # rank 0: 242 rows
    "Megatron": 444_872,
    "all": 445_896,
    "act": 321_992,
    "x_only": 74_184,
    "level0": 260_040,
    "level1": 12_232,
}


def test_bytes_that_a_layer_keeps(ranks):
    """128 tokens, h 64, f 128, 8 experts of 2 ranks, top 2, fp32; nothing is left over."""
    variants = [None] + [OVERLAP | {"save": policy} for policy in (ALL, *POLICIES.values())]
    (kept, _), (other, _) = ranks(
        2, jobs.saved_bytes, "te", EP, SIZES, variants, 128, setup=ADAPTOR
    )
    assert dict(zip(KEPT, kept, strict=True)) == KEPT
    assert kept[-1] < 0.03 * kept[1]
    for found, rows in ((kept, 242), (other, 2 * 128 * 2 - 242)):
        _, everything, act, x_only, level0, level1 = found
        element, h, f = 4, 64, 128
        assert everything - act == rows * f * element
        assert everything - x_only == rows * 3 * f * element
        assert everything - level0 == rows * (h + f) * element
        assert everything - level1 == rows * (h + 3 * f) * element


@pytest.mark.parametrize("spec", ["te", "local"])
def test_level1_keeps_nothing_of_shared_experts(ranks, spec):
    sizes = SIZES | {"moe_shared_expert_intermediate_size": 128}
    variants = [program | {"save": LEVEL1} for program in (SERIAL, OVERLAP)]
    for kept, _ in ranks(2, jobs.saved_bytes, spec, EP, sizes, variants, 128, setup=ADAPTOR):
        assert max(kept) < 13_000  # as without shared experts


def test_policies_join_and_count():
    assert LEVEL0.__class__(rows=False, fc1=False, act=False) == LEVEL0 | X_ONLY
    assert ALL | ACT == ACT
    assert ALL | LEVEL1 == LEVEL1
    sizes = {name: policy.elements(7168, 2048) for name, policy in POLICIES.items()}
    assert sizes == {
        "act": 7168 + 4096, "x_only": 7168, "level0": 4096, "level1": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("hidden", "ffn", "level0"),
    [(4096, 14336, 39), (5120, 1536, 68), (7168, 2048, 69), (2048, 768, 65)],
    ids=["Mixtral 8x7B", "DeepSeek-V2", "DeepSeek-V3", "Qwen3-30B-A3B"],
)
def test_shares_that_are_dropped(hidden, ffn, level0):
    whole = ALL.elements(hidden, ffn)
    assert round(100 * (1 - LEVEL0.elements(hidden, ffn) / whole)) == level0
    assert LEVEL1.elements(hidden, ffn) == 0


def test_load_of_a_rank():
    assert load(100, tokens=50, topk=2, slices=1) == 1.0
    assert load(100, tokens=25, topk=2, slices=2) == 1.0
    assert load(3, tokens=0, topk=2, slices=1) == 0.0


def test_ranks_decide_for_themselves(ranks):
    """One rank has nearly all rows and drops, the other keeps; level0 is added on both."""
    cases = [
        case("grouped", experts=5, **SHARED),
        case("all-gather", SERIAL, experts=5, moe_token_dispatcher_type="allgather"),
        case("one by one, local spec", experts=5, spec="local", **ONE_BY_ONE),
    ]
    requests = [
        {"recompute_above": 1.25},
        {"recompute_above": 1.25, "save": LEVEL0},
        {"recompute_above": 4.0},
    ]
    first, second = ranks(2, jobs.compare_policies, cases, requests, setup=ADAPTOR)
    check([*first, *second])
    for here, there in zip(first, second, strict=True):
        drops = here.policy["recompute_above"] == 1.25
        level0 = "save" in here.policy
        assert ("recompute" in here.order) is drops or level0
        assert ("recompute" in there.order) is level0
        assert here.collectives == there.collectives
