"""Training with ``--moe-zero-memory`` and load-aware experts has the digits of plain training."""

from __future__ import annotations

import pytest

from tests.training.one_rank import column
from tests.training.test_layouts import MOE, PP, TP

SHARED = f"{MOE} --moe-shared-expert-intermediate-size 64"
MTP = f"{SHARED} --mtp-num-layers 1"
LOCAL = f"{MOE} --transformer-impl local"
EP = "--expert-model-parallel-size 2"
SP = f"{TP} --sequence-parallel {EP}"
OVERLAP = "--moe-alltoall-overlap-comm"
LEVEL0, LEVEL1 = "--moe-zero-memory level0", "--moe-zero-memory level1"
ADAPTIVE = "--moe-adaptive-recompute-activation --moe-adaptive-recompute-activation-scale 1.05"
LORA = "--lora-r 4 --lora-target-modules linear_qkv experts.linear_fc1 experts.linear_fc2"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

ROWS = {
    "distributed-optimizer": (2, SHARED, f"{EP} {DISTRIBUTED}", LEVEL1),
    "adaptive": (2, MOE, EP, f"{LEVEL0} {ADAPTIVE}"),
    "sequence": (4, SHARED, f"{SP} --expert-tensor-parallel-size 1", LEVEL1),
    "sequence-expert-tensor": (
        4,
        SHARED,
        f"{SP} --expert-tensor-parallel-size 2",
        f"{LEVEL0} {ADAPTIVE}",
    ),
    "virtual-pipeline": (
        4,
        MOE,
        f"{PP} --num-layers-per-virtual-pipeline-stage 1 {EP}",
        f"{LEVEL1} --moe-zero-memory-num-layers 1",
    ),
    "mtp": (2, MTP, EP, LEVEL1),
    "local": (2, LOCAL, f"{EP} {DISTRIBUTED}", LEVEL1),
    "swap": (2, MOE, EP, f"{LEVEL1} --swap-attention --swap-min-bytes 0"),
    "recompute-norm": (2, MOE, EP, f"{LEVEL1} --recompute-norm"),
    "recompute-core": (2, MOE, f"{EP} --recompute-granularity selective", LEVEL0),
    "fused-permutation": (
        2,
        MOE,
        f"{EP} --use-fused-moe-token-permute-and-unpermute",
        LEVEL1,
    ),
    "context": (4, MOE, f"--context-parallel-size 2 {EP}", LEVEL1),
    "bf16": (2, SHARED, f"{EP} --bf16", LEVEL1),
    "tp-extends-ep": (4, SHARED, f"{SP} --moe-tp-extend-ep", LEVEL1),
    "lora": (2, MOE, f"{EP} {LORA}", LEVEL1),
    "frozen-experts": (2, MOE, f"{EP} --lora-r 4 --lora-target-modules linear_qkv", LEVEL0),
}
SERIAL = {  # without a program of its own: Megatron's layer is the plain one
    "all-gather": (2, MOE, f"{EP} --moe-token-dispatcher-type allgather", LEVEL1),
    "divided-backward": (2, MOE, f"{PP} --use-nanopipe", LEVEL1),
}


def losses(one_rank, row, program=""):
    """Without and with the flags of a row."""
    size, model, layout, flags = row
    reference = one_rank(model)
    plain = reference.plain(size, f"{layout} {program}")
    return plain, reference.train(size, f"{layout} {program} {flags}")


@pytest.mark.weekly_cases(
    *("distributed-optimizer", "adaptive", "sequence", "recompute-norm", "fused-permutation"),
    *("context", "tp-extends-ep", "lora"),
    "virtual-pipeline",
    "mtp",
    "local",
    "recompute-core",
    "bf16",
    "frozen-experts",
)
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_digits_are_those_without_the_flags(row, one_rank):
    plain, saving = losses(one_rank, row, OVERLAP)
    for name in ("lm_loss", "grad_norm"):
        assert column(saving, name) == column(plain, name)


@pytest.mark.weekly_cases("all-gather")
@pytest.mark.slow
@pytest.mark.parametrize("row", SERIAL.values(), ids=SERIAL)
def test_digits_are_nearly_those_of_megatrons_layer(row, one_rank):
    plain, saving = losses(one_rank, row)
    for name in ("lm_loss", "grad_norm"):
        assert column(saving, name) == pytest.approx(column(plain, name), rel=1e-6)
