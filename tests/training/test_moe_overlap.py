"""Hidden collectives of experts, in the trainer: losses are those without the flags."""

from __future__ import annotations

import pytest

from tests.training.one_rank import column, made_once
from tests.training.test_layouts import MOE, PP, TP

SHARED = f"{MOE} --moe-shared-expert-intermediate-size 96"
EP = "--expert-model-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
OVERLAP = "--moe-alltoall-overlap-comm"
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
    "recompute-shared": (
        2,
        SHARED,
        f"{EP} --recompute-granularity selective --recompute-modules shared_experts moe_act",
    ),
    "unfused": (2, SHARED, f"{EP} --no-gradient-accumulation-fusion"),
    "lora": (2, SHARED, f"{EP} {LORA}"),
    "aux-loss": (
        2,
        f"{SHARED} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
        EP,
    ),
}


@pytest.fixture(scope="module")
def one_rank(rank_pool, tmp_path_factory):
    return made_once(rank_pool.run, tmp_path_factory)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_without_the_flag(layout, one_rank):
    size, model, flags = LAYOUTS[layout]
    reference = one_rank(model)
    plain = reference.train(size, flags)
    hidden = reference.train(size, f"{flags} {OVERLAP}")
    for name, tolerance in (("lm_loss", 1e-6), ("grad_norm", 1e-5)):
        assert column(hidden, name) == pytest.approx(column(plain, name), rel=tolerance)
