"""Experts with adapters, dropout, fp16 and changed layouts train the same by every program.

Adam makes one step of every gradient, however small, so runs with adapters use SGD: the gradients
of their zeros differ by rounding alone.
"""

from __future__ import annotations

import pytest

from tests.training.one_rank import assert_same_training, column
from tests.training.test_layouts import MOE, PP, TP

SHARED = f"{MOE} --moe-shared-expert-intermediate-size 64"
EP, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
SP = f"{TP} --sequence-parallel"
SLICED = f"{SP} --expert-tensor-parallel-size 2"
OVERLAP = "--moe-alltoall-overlap-comm"
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
NODES_OF_TWO = {"LOCAL_WORLD_SIZE": "2"}
PROGRAMS = {  # ranks, flags
    "plain": (2, EP),
    "overlap": (2, f"{EP} {OVERLAP}"),
    "dedup": (2, f"{EP} --moe-alltoall-exchange dedup {OVERLAP}"),
    "hierarchical": (4, f"{EP4} --moe-alltoall-exchange hierarchical {OVERLAP}"),
    "gather": (2, f"{EP} --moe-token-dispatcher-type allgather --moe-allgather-overlap-comm"),
    "pieces": (2, f"{EP} --use-pipe-experts"),
    "ampipe": (2, f"{EP} --ampipe-degree 2"),
    "groups": (2, f"{SLICED} --moe-experts-pipeline-degree 2 {OVERLAP}"),
    "extended": (2, f"{SP} --moe-tp-extend-ep {OVERLAP}"),
    "saving": (2, f"{EP} {OVERLAP} --moe-zero-memory level1"),
}
LORA = (
    "--lora-r 4 --lora-target-modules linear_qkv experts.linear_fc1 experts.linear_fc2 "
    "--optimizer sgd --lr 0.5"
)
ADAPTERS = [
    ("overlap", f"{SELECTIVE} moe"),
    ("plain", UNIFORM),
    ("overlap", BLOCK),
    ("dedup", f"{SELECTIVE} moe_act layernorm core_attn"),
    ("hierarchical", UNIFORM),
    ("gather", f"{SELECTIVE} moe"),
    ("pieces", f"{SELECTIVE} moe_act"),
    ("ampipe", UNIFORM),
    ("groups", f"{SELECTIVE} shared_experts"),
    ("extended", "--recompute-activation-function"),
    ("saving", "--recompute-norm"),
]
DROPOUT = "--hidden-dropout 0.2 --attention-dropout 0.1"


def trained(reference, program, more):
    size, flags = PROGRAMS[program]
    nodes = NODES_OF_TWO if program == "hierarchical" else None
    return reference.train(size, f"{flags} {more}", nodes)


@pytest.mark.weekly_cases(
    "plain-*",
    "ampipe-*",
    "groups-*",
    "saving-*",
    "overlap-*block*",
    "overlap---*",
    "dedup---*",
    "pieces---*",
    "gather---*",
    "hierarchical---*",
)
@pytest.mark.slow
@pytest.mark.parametrize(("program", "recompute"), ADAPTERS)
def test_adapters_of_experts_with_recomputation(program, recompute, one_rank):
    reference = one_rank(SHARED)
    expected = reference.plain(1, LORA)
    records = trained(reference, program, f"{LORA} {recompute}")
    assert_same_training(records, expected, norm=1e-5)


@pytest.mark.weekly
@pytest.mark.slow
def test_adapters_of_experts_beside_another_micro_batch(one_rank):
    reference = one_rank(SHARED)
    plain = reference.train(2, f"{LORA} {EP} --bf16")
    records = reference.train(2, f"{LORA} {EP} --bf16 --moe-fb-overlap {SELECTIVE} moe_act")
    assert_same_training(records, plain, loss=0, norm=0)


DROPPED = [
    ("overlap", f"{SELECTIVE} moe"),
    *[(name, UNIFORM) for name in PROGRAMS if name not in ("overlap", "saving")],
    ("saving", "--recompute-norm"),
]


@pytest.mark.weekly_cases(
    *(
        "plain-*",
        "dedup-*",
        "hierarchical-*",
        "gather-*",
        "pieces-*",
        "groups-*",
        "extended-*",
        "overlap---*",
        "saving---*",
    )
)
@pytest.mark.slow
@pytest.mark.parametrize(("program", "recompute"), DROPPED)
def test_recomputation_drops_what_was_dropped(program, recompute, one_rank):
    """The same random numbers, so the same digits; other ones without dropout."""
    reference = one_rank(SHARED)
    expected = trained(reference, program, DROPOUT)
    assert_same_training(trained(reference, program, f"{DROPOUT} {recompute}"), expected, norm=1e-6)
    pairs = zip(expected, reference.records, strict=False)  # it trained for more steps
    assert max(abs(one["lm_loss"] - other["lm_loss"]) for one, other in pairs) > 1e-4


@pytest.mark.weekly_cases(
    *(
        "overlap",
        "dedup",
        "hierarchical",
        "gather",
        "ampipe",
        "groups",
        "extended",
        "saving",
        "pieces",
    )
)
@pytest.mark.slow
@pytest.mark.parametrize("program", list(PROGRAMS))
def test_fp16(program, one_rank):
    reference = one_rank(SHARED)
    fp16 = "--fp16 --initial-loss-scale 1024"
    expected = reference.plain(1, fp16)
    records = trained(reference, program, fp16)
    assert column(records, "loss_scale") == column(expected, "loss_scale") == [1024] * 2
    # Sums of another order differ by roundings of 5e-4 each, as each processor adds them.
    assert_same_training(records, expected, loss=1e-4, norm=1e-3)


@pytest.mark.weekly_cases("overlap", "plain")
@pytest.mark.slow
@pytest.mark.parametrize("program", ["plain", "overlap", "extended"])
def test_a_scale_that_overflows_skips_steps_on_all_ranks(program, one_rank):
    records = trained(one_rank(SHARED), program, "--fp16 --initial-loss-scale 4294967296")
    assert column(records, "skipped_iterations") == [1] * 2
    assert column(records, "loss_scale") == [2.0**32, 2.0**31]


DISTRIBUTED = "--use-distributed-optimizer"
RESHARDED = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
TP4 = "--micro-batch-size 2 --tensor-model-parallel-size 4 --sequence-parallel"
EXTENDED = "--moe-tp-extend-ep"
RESUMED = {  # (ranks, flags) before and after, the optimizer
    "to-one-rank": ((2, f"{SP} {EXTENDED}"), (1, ""), ""),
    "to-expert-ranks": ((2, f"{SP} {EXTENDED}"), (4, EP4), DISTRIBUTED),
    "from-one-rank": ((1, ""), (4, f"{SP} {EP} {EXTENDED}"), RESHARDED),
    "to-more-tensor-ranks": ((4, f"{SP} {EP} {EXTENDED}"), (4, f"{TP4} {EXTENDED}"), RESHARDED),
    "to-slices": ((4, f"{TP4} {EXTENDED}"), (2, SP), RESHARDED),
    "from-a-pipeline": ((4, f"{SP} {PP} {EXTENDED}"), (4, f"{TP4} {EXTENDED}"), DISTRIBUTED),
    "from-replicas": ((4, f"{SP} {EXTENDED}"), (2, f"{SP} {EXTENDED}"), RESHARDED),
}


@pytest.mark.weekly_cases(
    *(
        "to-one-rank",
        "to-more-tensor-ranks",
        "to-slices",
        "from-a-pipeline",
        "from-replicas",
        "to-expert-ranks",
    )
)
@pytest.mark.slow
@pytest.mark.parametrize("change", RESUMED)
def test_extended_experts_continue_on_another_layout(change, one_rank):
    """Two steps, then the third with the states of the optimizer divided otherwise."""
    (before, first), (after, second), optimizer = RESUMED[change]
    reference = one_rank(SHARED)
    flags = (f"{first} {optimizer}", f"{second} {optimizer}")
    assert_same_training(reference.resumed((before, after), flags), reference.records[2:])
