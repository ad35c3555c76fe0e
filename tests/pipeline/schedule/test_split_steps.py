"""Schedules with divided backwards train as Megatron's own do, to the last bit, with dropout."""

from __future__ import annotations

import pytest

from tests.pipeline.schedule.split_step_ranks import Case, compare
from tests.pipeline.schedule.step_ranks import Layout
from tests.support.lazy import needs

needs("megatron.core")

SETUP = "tests.support.warm"
FUSED = {"gradient_accumulation_fusion": True}
ZB, NANO = (4, {"kind": "zb-h1"}), (4, {"kind": "nanopipe"})


def check(results, cases):
    for found in results:
        assert {name: one.different for name, one in found.items()} == {name: [] for name in cases}


def test_two_ranks(ranks):
    cases = {
        "one chunk": Case(Layout(2), (ZB, NANO)),
        "one chunk, local": Case(Layout(2, spec="local", config=FUSED), (ZB,)),
        "two chunks": Case(Layout(2, 2, config=FUSED), (ZB, NANO)),
        "two chunks, local": Case(Layout(2, 2, spec="local"), (NANO,)),
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


@pytest.mark.slow
def test_four_ranks(ranks):
    cases = {
        "reductions overlap": Case(Layout(2, 2, config=FUSED, ddp=OVERLAP), (NANO,)),
        "reductions overlap, local": Case(Layout(2, spec="local", ddp=OVERLAP), (ZB,)),
        "reductions overlap, local, fused": Case(
            Layout(2, 2, spec="local", config=FUSED, ddp={"overlap_grad_reduce": True}), (ZB,)
        ),
        "distributed optimizer": Case(Layout(2, ddp={"use_distributed_optimizer": True}), (NANO,)),
        "four stages": Case(Layout(4, 2), ((8, {"kind": "nanopipe"}), (8, {"kind": "zb-h1"}))),
        "tensor parallel": Case(Layout(2, 2, tensor=2, config=FUSED), (NANO,)),
        "tensor parallel, local": Case(Layout(2, tensor=2, spec="local"), (ZB,)),
        "context parallel": Case(Layout(2, context=2), (NANO,)),
        "experts": Case(Layout(2, 2, expert=2, config=EXPERTS | FUSED, ddp=OVERLAP), (NANO,)),
        "experts, local": Case(Layout(2, expert=2, spec="local", config=EXPERTS), (ZB,)),
        "latent attention": Case(Layout(2, 2, config=LATENT), (NANO,)),
        "latent attention, local": Case(Layout(2, spec="local", config=LATENT | FUSED), (ZB,)),
        "multi-token prediction": Case(Layout(2, 2, config=MTP | FUSED), (NANO,), mtp=1),
        "recompute": Case(Layout(2, 2, config=RECOMPUTE), (NANO,)),
        "selective recompute": Case(Layout(2, config=SELECTIVE), (ZB,)),
    }
    check(ranks(4, compare, cases, setup=SETUP, timeout=400), cases)
