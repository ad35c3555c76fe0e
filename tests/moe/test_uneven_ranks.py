"""One rank without tokens does not hang the others, and one that raises ends them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mindspeed.moe.deepspeed.gate import Window
from mindspeed.moe.device_bound import DeviceBound
from mindspeed.moe.dispatch.choice import CHOICES
from mindspeed.moe.layer.replacements import REPLACEMENTS
from mindspeed.moe.request import LayerRequest
from mindspeed.moe.save.policy import LEVEL0, LEVEL1
from mindspeed.testing import RankError
from tests.moe import uneven_ranks as jobs
from tests.moe.layer_ranks import EXPERTS
from tests.moe.test_dense_oracle import mlp
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
OVERLAP = {"overlap": True}
PADDED = {"exchange": "padded", "capacity": jobs.all_rows}
HOT = {"dropped": True, "hot_experts": 1}
PROGRAMS = {
    "alltoall": [
        {},
        {"async_permutation": True},
        {"dropped": True},
        OVERLAP,
        {**OVERLAP, "save": LEVEL0},
        {**OVERLAP, "save": LEVEL1},
        {**OVERLAP, "recompute_above": 1.25},
        {"exchange": "dedup"},
        {**OVERLAP, "exchange": "dedup"},
        {**OVERLAP, "exchange": "dedup", "save": LEVEL1},
        {"exchange": "hierarchical"},
        {**OVERLAP, "exchange": "hierarchical"},
        {**OVERLAP, "exchange": "hierarchical", "save": LEVEL1},
        PADDED,
        {**OVERLAP, **PADDED},
        {**OVERLAP, **PADDED, "save": LEVEL1},
        {**PADDED, "pipe_slices": 2},
        {"exchange": "window", "capacity": Window()},
        {"exchange": "window", "capacity": Window(capacity=1)},
        {**OVERLAP, "exchange": "window", "capacity": Window(capacity=1)},
        {"exchange": "device", "bound": DeviceBound(100.0)},
        {**OVERLAP, "exchange": "device", "bound": DeviceBound(100.0), "save": LEVEL1},
        {"pipe_slices": 1},
        {"pipe_slices": 2},
        {"pipe_slices": 2, "pipe_chained": True},
        {"expert_groups": 2},
        {**OVERLAP, "expert_groups": 4},
        HOT,
        {**OVERLAP, **HOT},
        {**OVERLAP, **HOT, "hot_experts": 3, "hot_messages": 2},
    ],
    "allgather": [{}, {"async_permutation": True}, OVERLAP],
}
WHOLE = ("dedup", "hierarchical", "window", "device")
"""Flags refuse them for sliced experts, and hot ones."""
SHARED = {"moe_shared_expert_intermediate_size": 20}


def test_every_dispatcher_and_every_request_is_among_the_programs():
    found = [(name, LayerRequest(**one)) for name, many in PROGRAMS.items() for one in many]
    emulated = {("alltoall", "hybridep")}  # in test_device_sizes, as symmetric memory is
    assert {(name, request.exchange) for name, request in found} == set(CHOICES) - emulated
    plain = LayerRequest()
    for field in dataclasses.fields(LayerRequest):
        values = {str(getattr(request, field.name)) for _, request in found}
        # Groups of processes; rows of 128 elements; places of experts, and who watches them; what
        # has tests of its own.
        elsewhere = field.name in ("nodes", "fp8", "slots", "watch", "row_exchange", "in_parts")
        assert elsewhere or values - {str(getattr(plain, field.name))}, field.name
    # Their fields: watch, slots, save and recompute_above, pipe_slices, expert_groups, hot_experts.
    names = [one.__name__ for one in REPLACEMENTS]
    assert names == ["watched", "placement", "saving", "pieces", "groups", "hot"]


def check(found, variants, atol=1e-5):
    """Programs against Megatron's own forward."""
    for expected, *results in found:
        for result, variant in zip(results, variants, strict=True):
            close(result.output, expected.output, atol, f"output, {variant}")
            assert result.gradients.keys() == expected.gradients.keys(), variant
            for name, gradient in expected.gradients.items():
                close(result.gradients[name], gradient, atol, f"{name}, {variant}")


def close(actual, expected, atol, title):
    """`atol` is for values up to 1; of larger ones each processor rounds sums more coarsely."""
    atol *= max([1.0, *expected.abs().flatten().tolist()])
    torch.testing.assert_close(
        actual, expected.detach(), rtol=0, atol=atol, msg=lambda text: f"{title}: {text}"
    )


def check_truth(found, first, topk=2):
    """Megatron's own forward against the sum over the chosen experts, in fp64 in one process."""
    ranks = [results[0] for results in found]
    weights = [
        {name: w.double().requires_grad_() for name, w in rank.extra["weights"].items()}
        for rank in ranks
    ]
    inputs = [rank.extra["input"].double().requires_grad_() for rank in ranks]
    local, chosen = EXPERTS // len(ranks), range(first, first + topk)
    outputs, losses = [], []
    for rank, x, own in zip(ranks, inputs, weights, strict=True):
        scores = (x @ own["router.weight"].t()).sigmoid()[..., first : first + topk]
        probs = scores / scores.sum(-1, keepdim=True)
        out = mlp(x, *(own[f"shared_experts.linear_fc{i}.weight"] for i in (1, 2)))
        for position, expert in enumerate(chosen):
            owner, index = divmod(expert, local)
            pair = (weights[owner][f"experts.linear_fc{i}.weight{index}"] for i in (1, 2))
            out = out + probs[..., position, None] * mlp(x, *pair)
        outputs.append(out)
        losses.append((out * rank.extra["output_weight"]).sum())
    torch.autograd.backward(losses)
    for rank, x, own, output in zip(ranks, inputs, weights, outputs, strict=True):
        close(rank.output.double(), output, 1e-5, "output")
        close(rank.gradients["input"].double(), x.grad, 1e-5, "input")
        for name, weight in own.items():
            found_here = rank.gradients.get(name)
            if weight.grad is None:
                assert found_here is None or not found_here.any(), name
            else:
                close(found_here.double(), weight.grad, 1e-5, name)


@pytest.mark.slow
@pytest.mark.weekly_cases("rank 1-alltoall", "rank 0-allgather")
@pytest.mark.parametrize("dispatcher", PROGRAMS)
@pytest.mark.parametrize("first", [0, 4], ids=["rank 0", "rank 1"])
def test_all_tokens_on_one_rank(ranks, dispatcher, first):
    """The other rank has no rows, nor have two experts of the one."""
    overrides = {"moe_token_dispatcher_type": dispatcher, **SHARED}
    found = ranks(2, jobs.crowded, {"expert": 2}, overrides, PROGRAMS[dispatcher], first,
                  setup=ADAPTOR)  # fmt: skip
    check(found, PROGRAMS[dispatcher])
    check_truth(found, first)


@pytest.mark.parametrize("first", [0, 1], ids=["rank 0", "rank 1"])
def test_all_tokens_on_the_single_expert_of_a_rank(ranks, first):
    """What ``--moe-fb-overlap`` does to a rank with one expert."""
    check(ranks(2, jobs.crowded_single, first, setup=ADAPTOR), ["rows of its own"])


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", PROGRAMS)
def test_all_tokens_on_one_rank_with_fused_permutation(ranks, dispatcher):
    overrides = {"moe_token_dispatcher_type": dispatcher, **SHARED}
    found = ranks(2, jobs.crowded_fused, {"expert": 2}, overrides, PROGRAMS[dispatcher], 4,
                  setup=ADAPTOR)  # fmt: skip
    check(found, ["Megatron's", *PROGRAMS[dispatcher]])


@pytest.mark.weekly_cases("tp2-ep2-etp2-rank 0")
@pytest.mark.parametrize("first", [0, 4], ids=["rank 0", "rank 1"])
@pytest.mark.parametrize(
    ("layout", "attached"),
    [
        ({"expert": 2}, {}),
        pytest.param({"tensor": 2, "expert": 2}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"tensor": 2, "expert": 2, "expert_tensor": 2},
            {"tensor_overlap": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ep2", "tp2-ep2", "tp2-ep2-etp2"],
)
def test_all_tokens_of_chunks_of_the_sequence_on_one_rank(ranks, layout, attached, first):
    """Ampipe: against Megatron's own transformer layer."""
    degrees = [1, 2, 4]
    size = 4 if "expert_tensor" in layout else 2
    found = ranks(size, jobs.crowded_ampipe, layout, degrees, first, attached, setup=ADAPTOR)
    check(found, degrees, atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", PROGRAMS)
def test_all_tokens_on_one_of_two_nodes(ranks, dispatcher):
    """Four ranks: one has all rows, one of its node and two of the other have none."""
    overrides = {"moe_token_dispatcher_type": dispatcher, **SHARED}
    programs = PROGRAMS[dispatcher]
    programs = [one for one in programs if one.get("hot_experts", 0) < 3]
    programs = [one for one in programs if one.get("expert_groups", 1) < 3]
    found = ranks(4, jobs.crowded, {"expert": 4}, overrides, programs, 2, setup=ADAPTOR)
    check(found, programs)
    check_truth(found, 2)


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", PROGRAMS)
def test_all_tokens_on_one_rank_of_sliced_experts(ranks, dispatcher):
    layout = {"tensor": 2, "expert": 2, "expert_tensor": 2}
    programs = PROGRAMS[dispatcher]
    programs = [one for one in programs if one.get("exchange") not in WHOLE]
    programs = [one for one in programs if not one.get("hot_experts")]
    overrides = {"moe_token_dispatcher_type": dispatcher, **SHARED}
    check(ranks(4, jobs.crowded, layout, overrides, programs, 0, setup=ADAPTOR), programs)


@pytest.mark.slow
def test_one_token_against_many(ranks):
    """Megatron's router takes one token at least; it goes to the other rank, as all do."""
    options, programs = {"tokens": (1, 7)}, PROGRAMS["alltoall"]
    # Every rank of the padded programs has the same number of tokens.
    equal = ("padded", "device")
    programs = [one for one in programs if one.get("exchange") not in equal]
    found = ranks(2, jobs.crowded_with, options, {"expert": 2}, SHARED, programs, 4,
                  setup=ADAPTOR)  # fmt: skip
    check(found, programs)
    check_truth(found, 4)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("dispatcher", "changes"),
    [
        ("alltoall", OVERLAP),
        ("alltoall", {**OVERLAP, "save": LEVEL1}),
        ("alltoall", {"pipe_slices": 2}),
        ("allgather", OVERLAP),
        ("alltoall", {**OVERLAP, "exchange": "dedup"}),
        ("alltoall", {**OVERLAP, "exchange": "hierarchical"}),
        ("alltoall", {**OVERLAP, **PADDED}),
        ("alltoall", {**OVERLAP, "exchange": "window", "capacity": Window(capacity=1)}),
        ("alltoall", {**OVERLAP, "expert_groups": 2}),
        ("alltoall", {**OVERLAP, **HOT}),
    ],
    ids=[
        *("overlap", "level1", "pieces", "all-gather", "dedup", "hierarchical", "padded"),
        *("window", "groups", "hot"),
    ],
)
def test_a_rank_that_raises_in_a_stage_is_named_first(ranks, dispatcher, changes, where):
    """The others, which wait for it in a collective, end with it."""
    with pytest.raises(RankError) as raised:
        ranks(2, jobs.failing, changes, dispatcher, where, setup=ADAPTOR, timeout=60)
    assert (raised.value.rank, raised.value.kind) == (1, "raised")
    assert isinstance(raised.value.original, jobs.StageError)
