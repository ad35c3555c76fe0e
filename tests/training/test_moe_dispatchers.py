"""All-gather, deduplicated and hierarchical dispatch in the trainer: the losses of one rank."""

from __future__ import annotations

import pytest

from tests.training.one_rank import assert_same_training
from tests.training.test_layouts import MOE, MTP, PP, TP

SHARED = f"{MOE} --moe-shared-expert-intermediate-size 64"
GATHER = "--moe-token-dispatcher-type allgather --moe-allgather-overlap-comm"
EP = "--expert-model-parallel-size 2"
TENSOR = f"{TP} --sequence-parallel {EP}"
OPTIMIZER = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules moe"
VIRTUAL = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
DEDUP = "--moe-alltoall-exchange dedup --moe-alltoall-overlap-comm"
NODES = "--moe-tp-extend-ep --moe-hierarchical-alltoallv --moe-alltoall-overlap-comm"
ZERO = "--moe-zero-memory level1"
LORA = "--lora-r 4 --lora-target-modules linear_qkv experts.linear_fc1 experts.linear_fc2"
LAYOUTS = {
    "hierarchical": (4, SHARED, f"{TENSOR} {NODES} {OPTIMIZER}"),
    "gather": (2, SHARED, f"{EP} {GATHER} {OPTIMIZER}"),
    "dedup": (2, SHARED, f"{EP} {DEDUP} {OPTIMIZER}"),
    "gather-slices": (4, SHARED, f"{TENSOR} --expert-tensor-parallel-size 2 {GATHER}"),
    "gather-extended": (4, SHARED, f"{TENSOR} --moe-tp-extend-ep {GATHER}"),
    "gather-recompute": (2, SHARED, f"{EP} {GATHER} {FULL}"),
    "gather-virtual-pipeline": (4, MOE, f"{EP} {GATHER} {VIRTUAL}"),
    "gather-local": (2, f"{MOE} --transformer-impl local", f"{EP} {GATHER}"),
    "gather-mtp": (2, f"{MOE} {MTP}", f"{EP} {GATHER}"),
    "gather-asynchronous": (
        2,
        MOE,
        f"{EP} --moe-token-dispatcher-type allgather --moe-permutation-async-comm {SELECTIVE}",
    ),
    "dedup-recompute": (2, SHARED, f"{EP} {DEDUP} {SELECTIVE}"),
    "dedup-virtual-pipeline": (4, MOE, f"{EP} {DEDUP} {VIRTUAL}"),
    "dedup-alone-local": (
        2,
        f"{MOE} --transformer-impl local",
        f"{EP} --moe-alltoall-exchange dedup {FULL}",
    ),
    "hierarchical-by-name": (
        4,
        MOE,
        "--expert-model-parallel-size 4 --moe-alltoall-exchange hierarchical "
        "--moe-permutation-async-comm",
    ),
    "gather-zero-memory": (2, SHARED, f"{EP} {GATHER} {ZERO}"),
    "dedup-zero-memory": (2, SHARED, f"{EP} {DEDUP} {ZERO}"),
    "hierarchical-zero-memory": (4, SHARED, f"{TENSOR} {NODES} {ZERO}"),
    "gather-context": (4, MOE, f"{EP} {GATHER} --context-parallel-size 2 --micro-batch-size 2"),
    "dedup-context": (4, MOE, f"{EP} {DEDUP} --context-parallel-size 2 --micro-batch-size 2"),
    "hierarchical-mtp": (4, f"{MOE} {MTP}", f"{TENSOR} {NODES}"),
}


@pytest.mark.weekly_cases(
    "gather-virtual-pipeline",
    "gather-recompute",
    "gather-mtp",
    "gather-zero-memory",
    "hierarchical-zero-memory",
    "gather-context",
    "gather-local",
    "dedup",
    "gather-slices",
    "gather-extended",
    "dedup-recompute",
    "dedup-virtual-pipeline",
    "hierarchical-by-name",
    "dedup-zero-memory",
    "dedup-context",
    "hierarchical-mtp",
    "gather",
)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_rank(layout, one_rank):
    world_size, model, flags = LAYOUTS[layout]
    reference = one_rank(model)
    nodes_of_two = {"LOCAL_WORLD_SIZE": "2"} if "hierarchical" in layout else None
    records = reference.train(world_size, flags, nodes_of_two)
    assert_same_training(records, reference.records)


@pytest.mark.weekly  # with recomputation beside, in test_expert_combinations.py
@pytest.mark.slow
@pytest.mark.parametrize("flags", [GATHER, DEDUP], ids=["gather", "dedup"])
def test_adapters_of_experts_train_as_without_the_flags(flags, one_rank):
    reference = one_rank(MOE)
    dispatcher = flags.partition("--moe-allgather")[0] if "allgather" in flags else ""
    plain = reference.train(2, f"{EP} {LORA} {dispatcher}")
    records = reference.train(2, f"{EP} {LORA} {flags}")
    assert_same_training(records, plain)
