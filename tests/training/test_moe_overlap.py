"""Hidden collectives of experts, in the trainer: losses are those without the flags."""

from __future__ import annotations

import pytest

from tests.support.trainer_job import SETUP
from tests.training.moe_overlap_job import executed
from tests.training.one_rank import assert_same_training, column
from tests.training.test_layouts import MOE, PP, TP

SHARED = f"{MOE} --moe-shared-expert-intermediate-size 96"
EP = "--expert-model-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
OVERLAP, ASYNC = "--moe-alltoall-overlap-comm", "--moe-permutation-async-comm"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SP = f"{TP} --sequence-parallel {EP}"
VPP = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
LORA = "--lora-r 4 --lora-target-modules linear_qkv experts.linear_fc1 experts.linear_fc2"

LAYOUTS = {
    "distributed-optimizer": (2, SHARED, f"{EP} {DISTRIBUTED}"),
    "sequence-expert-tensor": (4, MOE, f"{SP} --expert-tensor-parallel-size 2"),
    "sequence": (4, SHARED, f"{SP} --expert-tensor-parallel-size 1 {DISTRIBUTED}"),
    "local": (2, f"{SHARED} --transformer-impl local", f"{EP} --overlap-grad-reduce"),
    "sequential": (2, MOE.replace("--moe-grouped-gemm ", ""), f"{EP} {DISTRIBUTED}"),
    "local-sequential": (
        2,
        f"{MOE.replace('--moe-grouped-gemm ', '')} --transformer-impl local",
        EP,
    ),
    "pipeline": (4, SHARED, f"{PP} {EP}"),
    "virtual-pipeline-recompute": (4, SHARED, f"{VPP} {EP} {FULL} {DISTRIBUTED}"),
    "mtp": (2, f"{SHARED} --mtp-num-layers 1", EP),
    "context": (4, SHARED, f"--context-parallel-size 2 {EP}"),
    "unfused-recompute-shared": (
        2,
        SHARED,
        f"{EP} --no-gradient-accumulation-fusion "
        "--recompute-granularity selective --recompute-modules shared_experts moe_act",
    ),
    "lora": (2, SHARED, f"{EP} {LORA}"),
    "zero-2": (2, SHARED, f"{EP} --zero-stage 2"),
    "zero-3": (2, SHARED, f"{EP} --zero-stage 3"),
    "divided-backward": (4, SHARED, f"{PP} {EP} --pipeline-schedule zb-h1"),
    "fp8-recompute": (
        2,
        f"{MOE} --ffn-hidden-size 192 --fp8-format hybrid --fp8-recipe tensorwise",
        f"{EP} --bf16 --recompute-granularity selective --recompute-modules moe",
    ),
    "mxfp8": (
        2,
        f"{MOE} --ffn-hidden-size 192 --fp8-format hybrid --fp8-recipe mxfp8",
        f"{EP} --bf16 --moe-router-padding-for-fp8",
    ),
    "aux-loss-evaluation": (
        2,
        f"{SHARED} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
        f"{EP} --eval-iters 1 --eval-interval 2",
    ),
}


# Context, prediction layers, chunks and adapters: in the files of dispatchers and combinations.
@pytest.mark.weekly_cases(
    *("distributed-optimizer", "sequence", "sequential", "local", "pipeline"),
    *("virtual-pipeline-recompute", "mtp", "context", "lora", "zero-2", "fp8-recompute"),
    "local-sequential",
    "zero-3",
    "divided-backward",
    "mxfp8",
    "aux-loss-evaluation",
    "unfused-recompute-shared",
)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_without_the_flag(layout, one_rank):
    size, model, flags = LAYOUTS[layout]
    reference = one_rank(model)
    plain = reference.train(size, flags)
    hidden = reference.train(size, f"{flags} {OVERLAP}")
    assert_same_training(hidden, plain, loss=1e-6, norm=1e-5)


@pytest.mark.slow
def test_in_16_bits_losses_differ_by_rounding(one_rank):
    reference = one_rank(SHARED)
    plain = reference.train(2, f"{EP} --bf16 {DISTRIBUTED}")
    hidden = reference.train(2, f"{EP} --bf16 {DISTRIBUTED} {OVERLAP}")
    assert column(hidden, "lm_loss") == pytest.approx(column(plain, "lm_loss"), rel=1e-4)
    assert column(hidden, "lm_loss")[0] == column(plain, "lm_loss")[0]


@pytest.mark.slow
def test_every_layer_executes_the_program(rank_pool):
    """4 layers, of which the last is that of multi-token prediction, and 2 micro-batches."""
    model = f"{SHARED} --num-layers 3 --mtp-num-layers 1 {EP}".split()
    for flag, hidden in (
        (ASYNC, "count> permute count<"),
        (OVERLAP, "dispatch> shared_fc1 anchor"),
    ):
        for programs in rank_pool.run(2, executed, [*model, flag], setup=SETUP, backend=None):
            assert len(programs) == 4 * 2
            assert all(hidden in program for program in programs)


@pytest.mark.slow
def test_a_model_may_end_with_a_layer_without_experts(one_rank):
    """Megatron's schedule of overlapped experts left out its final norm."""
    dense = f"{MOE} --moe-layer-freq [0,1,1,0] --untie-embeddings-and-output-weights --bf16"
    reference, layout = one_rank(dense), f"{VPP} {EP}"
    plain = reference.train(4, layout)
    records = reference.train(4, f"{layout} --moe-fb-overlap")
    for name in ("lm_loss", "grad_norm"):
        assert column(records, name) == column(plain, name)
