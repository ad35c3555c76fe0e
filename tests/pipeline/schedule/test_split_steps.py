"""Schedules with divided backwards train as Megatron's own do, to the last bit, with dropout."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import pytest

from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from tests.pipeline.schedule.split_step_ranks import Case, compare, swapped
from tests.pipeline.schedule.step_ranks import BATCH, SEQUENCE, SIZES, Layout
from tests.support.lazy import needs

needs("megatron.core")

SETUP = "tests.support.warm"
FUSED = {"gradient_accumulation_fusion": True}
ZB, NANO = (4, {"kind": "zb-h1"}), (4, {"kind": "nanopipe"})


def check(results, cases):
    for found in results:
        for name, runs in found.items():
            assert [run.different for run in runs] == [[] for _ in cases[name].runs], name
    for name, case in cases.items():
        for number in range(len(case.runs)):
            # On rank 0 nobody waits for gradients of stage 0, so its backwards may all be whole.
            deferred = [found[name][number].deferred for found in results]
            assert deferred[-1], name


@pytest.mark.slow
def test_two_ranks(ranks):
    small = partial(Layout, num_layers=4)
    cases = {
        "one chunk": Case(Layout(2), (ZB, NANO)),
        "one chunk, local": Case(Layout(2, spec="local", config=FUSED), (ZB,)),
        "two chunks": Case(Layout(2, 2, config=FUSED), (ZB, NANO)),
        "two chunks, local": Case(Layout(2, 2, spec="local"), (NANO,)),
        "latent attention": Case(small(2, 2, config=LATENT), (NANO,)),
        "latent attention, local": Case(small(2, spec="local", config=LATENT | FUSED), (ZB,)),
        "multi-token prediction": Case(small(2, 2, config=MTP | FUSED), (NANO,), mtp=1),
        "recompute": Case(Layout(2, 2, config=RECOMPUTE), (NANO,)),
        "selective recompute": Case(small(2, config=SELECTIVE), (ZB,)),
    }
    check(ranks(2, compare, cases, setup=SETUP, timeout=240), cases)


OVERLAP = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.01,
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rope_type": "rope",
}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 1,
}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}


SMALL = partial(Layout, num_layers=4)
EACH = {
    "reductions overlap, local, fused": Case(
        SMALL(2, 2, spec="local", config=FUSED, ddp={"overlap_grad_reduce": True}), (ZB,)
    ),
    "four stages": Case(Layout(4, 2), ((8, {"kind": "nanopipe"}), (8, {"kind": "zb-h1"}))),
    "tensor parallel, local": Case(SMALL(2, tensor=2, spec="local"), (ZB,)),
    "context parallel": Case(SMALL(2, context=2), (NANO,)),
    "experts": Case(SMALL(2, 2, expert=2, config=EXPERTS | FUSED, ddp=OVERLAP), (NANO,)),
}
OTHERS = {
    "reductions overlap": Case(SMALL(2, 2, config=FUSED, ddp=OVERLAP), (NANO,)),
    "reductions overlap, local": Case(SMALL(2, spec="local", ddp=OVERLAP), (ZB,)),
    "distributed optimizer": Case(SMALL(2, ddp={"use_distributed_optimizer": True}), (NANO,)),
    "tensor parallel": Case(SMALL(2, 2, tensor=2, config=FUSED), (NANO,)),
    "experts, local": Case(SMALL(2, expert=2, spec="local", config=EXPERTS), (ZB,)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(EACH, id="each"),
        pytest.param(OTHERS, id="others", marks=pytest.mark.weekly),
    ],
)
def test_four_ranks(ranks, cases):
    """Chunks have one or two layers."""
    check(ranks(4, compare, cases, setup=SETUP, timeout=400), cases)


def stash(row):
    """Most weight gradients of a row that wait on the device, in chunks."""
    change = {"I": 1, "W": -1, "O": -1, "L": 1}
    return max(accumulate(change.get(action.op, 0) for action in row))


@pytest.mark.slow
def test_stashes_of_weight_gradients_on_the_host(ranks):
    """Bytes of layers with 16 s b h elements between I and W; a chunk is one layer."""
    case = Case(Layout(4, 2), ((8, {"kind": "nanopipe", "swap": True}),))
    plan = build_plan(ScheduleRequest(kind="nanopipe", swap=True), 4, 2, 8)
    chunk = 16 * 4 * SEQUENCE * BATCH * SIZES["hidden_size"]
    linears = 4 * 2 * 8
    results = ranks(4, swapped, case, setup=SETUP, timeout=240)
    for rank, (found, without, distance) in enumerate(results):
        assert found.different == [], "of the same order without copies"
        assert distance < 1e-6, "sums are in another order than Megatron's"
        assert found.deferred == without.deferred == linears
        assert found.copied == (2 * rank * chunk, 2 * rank * chunk)
        row = plan.rows[rank]
        assert found.peak == stash(row) * chunk
        assert without.peak == stash([a for a in row if a.op not in "OL"]) * chunk
    assert [found.peak // chunk for found, _, _ in results] == [5, 7, 7, 5]
    assert [without.peak // chunk for _, without, _ in results] == [5, 7, 9, 11]
