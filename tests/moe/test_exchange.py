"""Deduplicated and hierarchical all-to-all against Megatron's dispatcher, and their bytes."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features.experts.moe_alltoall_exchange import MoeAlltoallExchange
from mindspeed.features.registry import conflicts_of
from mindspeed.moe.dispatch.compact import ID_DTYPE
from mindspeed.moe.dispatch.level import join, metadata_bytes, sum_rows, take_apart
from mindspeed.moe.nodes import divided
from mindspeed.moe.save.policy import LEVEL0, LEVEL1
from mindspeed.te import kernels
from tests.moe import dispatch_ranks as jobs
from tests.moe import expected_rows as expected
from tests.moe.dispatch_ranks import Case
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
SHARED = {"moe_shared_expert_intermediate_size": 20}
MASKED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
ONE = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
DEDUP = [
    {"exchange": "dedup"},
    {"exchange": "dedup", "async_permutation": True},
    {"exchange": "dedup", "overlap": True},
]
NODES = [variant | {"exchange": "hierarchical"} for variant in DEDUP]
OPTIONS = ("tokens", "steps", "masked")
EP, FOUR, TP_EP = {"expert": 2}, {"expert": 4}, {"tensor": 2, "expert": 4}


def case(name, layout=EP, variants=DEDUP, *, spec="te", experts=None, **overrides):
    own = {name: overrides.pop(name) for name in ("frozen", "fused") if name in overrides}
    options = {name: overrides.pop(name) for name in OPTIONS if name in overrides}
    overrides = {"moe_router_topk": 4} | overrides
    return Case(name, layout, overrides, variants, spec, experts, options=options, **own)


TWO = [
    case("routed"),
    case("local", spec="local"),
    case("shared", **SHARED),
    case("top 1", **ONE),
    case("one local expert", num_moe_experts=2, moe_router_topk=2),
    case("a rank without rows", experts=4),
    case("all to one expert", experts=1, **ONE),
    case("one token", tokens=1),
    case("fewer experts by capacity", moe_expert_capacity_factor=0.5),
    case(
        "padded to capacity",
        moe_expert_capacity_factor=1.0,
        moe_pad_expert_input_to_capacity=True,
    ),
    case("groups of experts", moe_router_num_groups=4, moe_router_group_topk=2),
    case("fp32 router", moe_router_dtype="fp32"),
    case("padding tokens", masked=True, **MASKED),
    case("frozen experts", frozen=True),
    case("two micro-batches", steps=2, **SHARED),
    case("one kernel each way", fused=True),
    case("numbers of tokens of their own", tokens=(5, 9)),
    case("fp64", params_dtype=torch.float64),
]


QUICK = {
    *("routed", "shared", "top 1", "a rank without rows", "fewer experts by capacity"),
    *("numbers of tokens of their own", "one kernel each way"),
}


def groups(cases):
    """The quick cases, and the others as slow ones; each in one launch."""
    others = [one for one in cases if one.name not in QUICK]
    return [
        pytest.param([one for one in cases if one.name in QUICK], id="quick"),
        pytest.param(others, id="others", marks=pytest.mark.slow),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("cases", groups(TWO))
def test_equal_to_megatrons_dispatcher(ranks, cases):
    for figures in ranks(2, jobs.compare_all, cases, setup=ADAPTOR):
        for one in figures:
            assert one.output <= 5e-7, one
            assert one.gradients <= 1e-6, one


BOTH = [*DEDUP, *NODES]
WIDE = {"num_moe_experts": 16}


FOUR_RANKS = [
    case("routed", FOUR, BOTH, **WIDE),
    case("local", FOUR, BOTH, spec="local", **WIDE),
    case("shared", FOUR, BOTH, **SHARED, **WIDE),
    case("tp 2", TP_EP, BOTH, **SHARED),
    case("top 1", FOUR, BOTH, **ONE),
    case("one local expert", FOUR, BOTH, num_moe_experts=4),
    case("one node without rows", FOUR, BOTH, experts=4),
    case("all to one expert", FOUR, BOTH, experts=1, **ONE),
    case("one token", FOUR, BOTH, tokens=1),
    case("frozen experts", FOUR, NODES, frozen=True),
    case("one kernel each way", FOUR, NODES, fused=True),
    case("numbers of tokens of their own", FOUR, NODES, tokens=(1, 7, 3, 1)),
    case("fewer experts by capacity", FOUR, BOTH, moe_expert_capacity_factor=0.5),
]


@pytest.mark.weekly_cases("others")
@pytest.mark.slow
@pytest.mark.parametrize("cases", groups(FOUR_RANKS))
def test_two_nodes_of_two_ranks_equal_megatrons_dispatcher(ranks, cases):
    for figures in ranks(4, jobs.compare_all, cases, setup=ADAPTOR):
        for one in figures:
            assert one.output <= 5e-7, one
            assert one.gradients <= 1e-6, one


@pytest.mark.parametrize(("dispatcher", "exchange"), [("alltoall", "dedup"), ("allgather", "flat")])
def test_too_many_experts_of_one_token_are_refused_on_all_ranks(ranks, dispatcher, exchange):
    for said in ranks(2, jobs.too_many, dispatcher, exchange, setup=ADAPTOR):
        assert said.startswith("a token has more than 2 experts")


@pytest.mark.slow
def test_what_hides_the_levels(ranks):
    cases = [case(name, FOUR, BOTH, **more) for name, more in (("routed", {}), ("shared", SHARED))]
    for figures in ranks(4, jobs.compare_all, cases, setup=ADAPTOR):
        exposed = [one.exposed for one in figures]
        # counts, metadata, rows, combine; without shared experts the anchor is all there is
        assert exposed[:3] == [(4, 3), (3, 3), (3, 1)]
        # and metadata, rows, combine within the node
        assert exposed[3:6] == [(7, 6), (6, 6), (6, 4)]
        assert exposed[6:9] == [(4, 3), (3, 3), (0, 0)]
        assert exposed[9:] == [(7, 6), (6, 6), (3, 3)]
        assert figures[-1].order == (
            "route count.counts> permute count.counts< dispatch.metadata> dispatch.rows> "
            "shared_fc1 dispatch.metadata< dispatch.rows< relay dispatch_node.metadata> "
            "dispatch_node.rows> dispatch_node.metadata< dispatch_node.rows< arrange experts "
            "disarrange combine_node.rows> combine_node.rows< merge combine.rows> shared_fc2 "
            "combine.rows< unpermute",
            "unpermute combine.rows> shared_fc2 combine.rows< merge combine_node.rows> "
            "combine_node.rows< disarrange experts arrange dispatch_node.rows> "
            "dispatch_node.metadata> dispatch_node.rows< dispatch_node.metadata< relay "
            "dispatch.rows> dispatch.metadata> weight_gradients shared_fc1 dispatch.rows< "
            "dispatch.metadata< permute route",
        )


@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "layout"), [("hierarchical", FOUR), ("dedup", EP)])
def test_rows_come_again_in_backward(ranks, exchange, layout):
    """What the experts do not keep is dispatched again, level by level."""
    variants = [
        {"exchange": exchange, "overlap": overlap, "save": policy}
        for overlap, policy in ((False, LEVEL0), (True, LEVEL0), (True, LEVEL1))
    ]
    cases = [
        case("te", layout, variants, **SHARED),
        case("local", layout, variants, spec="local"),
        case("no rows", layout, variants, experts=2, moe_router_topk=2),
    ]
    for figures in ranks(layout["expert"], jobs.compare_all, cases, setup=ADAPTOR):
        for one in figures:
            assert one.output <= 5e-7, one
            assert one.gradients <= 1e-6, one
            assert "refetch" in one.order[1]


def test_sums_are_rounded_once_for_each_hop(ranks):
    """bf16 tokens, every expert the identity: results against the sums in fp64."""
    for errors in ranks(4, jobs.errors_of_sums, setup=ADAPTOR):
        # The experts' rows, the sums of a rank, of a node, of all.
        assert errors["dedup"] <= 3 * 2**-8
        assert errors["hierarchical"] <= 4 * 2**-8


@pytest.mark.slow
@pytest.mark.parametrize("topk", [6, 2])
def test_bytes_are_those_of_the_routing(ranks, topk):
    """Every call of the ledger sends what the map of this run says, to the byte."""
    for found in ranks(4, jobs.exact_bytes, topk, setup=ADAPTOR):
        assert found["dedup"] == found["dedup expected"]
        assert found["hierarchical"] == found["hierarchical expected"]
        assert found["between"] < found["flat between"]


MODELS = {"DeepSeek-V2": (160, 6), "DeepSeek-V3": (256, 8), "Mixtral": (8, 2)}


@pytest.mark.parametrize(
    ("model", "nodes", "flat", "gathered", "dedup"),
    [
        ("DeepSeek-V2", 2, 3.00, 1, 0.99),
        ("DeepSeek-V2", 4, 4.50, 3, 2.48),
        ("DeepSeek-V2", 8, 5.25, 7, 3.90),
        ("DeepSeek-V3", 2, 4.00, 1, 1.00),
        ("DeepSeek-V3", 4, 6.00, 3, 2.71),
        ("DeepSeek-V3", 8, 7.00, 7, 4.63),
        ("Mixtral", 2, 1.00, 1, 0.79),
        ("Mixtral", 4, 1.50, 3, 1.39),
    ],
)
def test_expected_rows(model, nodes, flat, gathered, dedup):
    experts, topk = MODELS[model]
    assert round(expected.flat_rows(experts, topk, nodes), 2) == flat
    assert expected.gathered_rows(nodes) == gathered
    assert round(expected.dedup_rows(experts, topk, nodes), 2) == dedup


def test_expected_savings_of_one_level():
    savings = [round(100 * expected.saving(256, 8, 2**i)) for i in range(1, 7)]
    assert savings == [75, 55, 34, 18, 9, 4]


def test_expected_rows_are_the_mean_over_routings():
    generator = torch.Generator().manual_seed(3)
    chosen = torch.rand(20000, 16, generator=generator).topk(4, dim=1).indices
    owners = torch.zeros(20000, 4).scatter(1, chosen // 4, 1).mean(0)
    assert owners.mean().item() == pytest.approx(expected.chance(16, 4, 4), rel=1e-2)


FLAGS = {
    "num_experts": 8,
    "moe_token_dispatcher_type": "alltoall",
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 1,
    "moe_tp_extend_ep": True,
    "sequence_parallel": True,
    "world_size": 4,
}


def test_layers_with_an_exchange_of_their_own_are_refused():
    others = {"ampipe", "pipe-experts"}
    assert set(conflicts_of(MoeAlltoallExchange)) >= others | {"moe-fb-overlap"}


def problems(monkeypatch, node=2, exchange="flat", hierarchical=True, **changes):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(node))
    feature = MoeAlltoallExchange(
        moe_alltoall_exchange=exchange, moe_hierarchical_alltoallv=hierarchical
    )
    return "\n".join(map(str, feature.problems(FLAGS | changes)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe_tp_extend_ep": False}, "add --moe-tp-extend-ep"),
        ({"tensor_model_parallel_size": 1}, "--tensor-model-parallel-size is 1"),
        ({"node": 4}, "4 ranks fit into a node of 4"),
        ({"node": 3}, "4 ranks cannot be spread evenly over nodes of 3"),
        ({"node": 1}, "nodes have one rank each"),
        ({"num_experts": None}, "add --num-experts"),
        ({"moe_token_dispatcher_type": "allgather"}, "the dispatcher is allgather"),
        ({"exchange": "dedup"}, "are different exchanges"),
        ({"sequence_parallel": False, "tensor_model_parallel_size": 2}, "add --sequence-parallel"),
        ({"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
        ({"moe_model_type": "deepspeed_moe"}, "add --moe-no-drop"),
    ],
)
def test_flags_that_do_not_fit(monkeypatch, changes, said):
    assert not problems(monkeypatch)
    found = problems(monkeypatch, **changes)
    assert found.startswith("--moe-hierarchical-alltoallv: ") and said in found


def test_flags_of_one_level(monkeypatch):
    for exchange in ("dedup", "hierarchical"):
        given = {"exchange": exchange, "hierarchical": False, "moe_tp_extend_ep": False}
        assert not problems(monkeypatch, **given)
        said = problems(monkeypatch, **given, expert_tensor_parallel_size=2)
        assert f"--moe-alltoall-exchange {exchange}" in said and "cut in 2" in said
        assert "nothing is sent" in problems(monkeypatch, **given, expert_model_parallel_size=1)


def test_sums_of_copies_are_rounded_once():
    """256 + 1 is 256 in bf16."""
    rows = torch.tensor([256.0, 1.0, 1.0, 1.0, 1.0, 7.0]).bfloat16().unsqueeze(1)
    to = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool()
    _, _, row_id_map = kernels.moe_permute(torch.zeros(2, 1), None, to, 6)
    rows.requires_grad_()
    summed = sum_rows(rows, row_id_map, to, (2, 1))
    assert summed.dtype == torch.bfloat16
    assert summed.flatten().tolist() == [260, 7]
    summed.sum().backward()
    assert rows.grad is not None and rows.grad.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_metadata_is_one_tensor(dtype):
    weights = torch.rand(3, 3).to(dtype).requires_grad_()
    ids = torch.tensor([[0, 5, -1], [7, -1, -1], [1, 2, 3]], dtype=ID_DTYPE)
    joined = join(ids, weights)
    assert joined.nbytes == 3 * metadata_bytes(3, dtype.itemsize)
    again, same = take_apart(joined, 3)
    assert again.equal(ids) and same.equal(weights)
    same.sum().backward()
    assert weights.grad is not None and weights.grad.eq(1).all()


def test_ranks_of_nodes():
    assert divided([4, 5, 6, 7], 2) == [[4, 5], [6, 7]]
    assert divided([0, 2, 4, 6], 4) == [[0, 2], [4, 6]]
    for ranks in ([0, 1, 2], [0, 2, 1, 3]):
        with pytest.raises(ConfigError, match="not spread evenly"):
            divided(ranks, 2)


def test_flags_change_the_layers_of_a_model(ranks):
    flags = {"moe_token_dispatcher_type": "alltoall", "num_experts": 4}
    dedup = flags | {"moe_alltoall_exchange": "dedup", "expert_model_parallel_size": 2}
    for requests in ranks(2, jobs.requests_of, dedup, 2, setup=ADAPTOR):
        assert [one["exchange"] for one in requests] == ["dedup"] * 2
    nodes = flags | {"moe_alltoall_exchange": "hierarchical", "expert_model_parallel_size": 4}
    for rank, requests in enumerate(ranks(4, jobs.requests_of, nodes, 4, setup=ADAPTOR)):
        within, between = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert [one["nodes"] for one in requests] == [(between, within)] * 2
