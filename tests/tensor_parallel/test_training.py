"""Training with overlapped products: the losses, gradient norms and bytes of training without."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.support.lazy import needs
from tests.support.trainer_job import SETUP, metrics
from tests.tensor_parallel import coc_ranks

needs("megatron.core")

TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
LOCAL = "--transformer-impl local"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 64 "
    "--moe-shared-expert-intermediate-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none --expert-model-parallel-size 2"
)
MLA = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16 --mtp-num-layers 1"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TWO, HALVES = "--micro-batch-size 2 --global-batch-size 8", "--half-batch-overlap"
COC, FUSED = "--coc-parallel-num 4", "--use-ascend-coc --coc-fused-kernel"
# Ranks, flags of a run, flags that are added to it.
CASES = {
    "sequence parallel": (2, SP, COC),
    "tensor parallel, local spec, recomputed": (2, f"{TP} {LOCAL} {RECOMPUTE}", COC),
    "sequence parallel, local spec, bf16": (2, f"{SP} {LOCAL} --bf16", FUSED),
    "latent attention, multi-token prediction": (2, f"{SP} {MLA}", COC),
    "experts, gradients reduced during backward": (
        4,
        f"{SP} {MOE} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        COC,
    ),
    "recomputed without communication": (
        2,
        f"{SP} {RECOMPUTE} --optimize-recomp-communication-level 2",
        COC,
    ),
    "recomputed without all-reduces, local spec": (
        2,
        f"{TP} {LOCAL} {RECOMPUTE} --optimize-recomp-communication-level 1",
        COC,
    ),
    "stages, gathered output": (4, f"{SP} --pipeline-model-parallel-size 2", COC),
    "mc2, bf16": (2, f"{SP} --bf16", "--use-ascend-mc2"),
    "Megatron's flag": (2, SP, "--tp-comm-overlap"),
    "Megatron's flag, local spec": (2, f"{SP} {LOCAL}", "--tp-comm-overlap"),
    "half batches, gradients reduced during backward": (
        4,
        f"{SP} {TWO} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--recompute-granularity selective",
        HALVES,
    ),
    "half batches, backward in two, stages": (
        4,
        f"{SP} {TWO} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
        HALVES,
    ),
    "half batches, context parallelism, multi-token prediction": (
        4,
        f"{TP} {TWO} --context-parallel-size 2 --mtp-num-layers 1",
        HALVES,
    ),
    "half batches, four ranks, dropout, recomputed": (
        4,
        f"--tensor-model-parallel-size 4 --micro-batch-size 4 --hidden-dropout 0.1 {RECOMPUTE}",
        HALVES,
    ),
    "lengths that vary": (2, f"{SP} --pipeline-model-parallel-size 1 --seq-length 60", FUSED),
}
QUICK = ("sequence parallel",)
Run = tuple[Counter[tuple[str, str]], int, list[dict[str, Any]]]
"""Collectives, bytes sent, records of the log."""


@pytest.fixture(scope="module")
def plain_runs() -> dict[tuple[int, str], Run]:
    """Runs without overlap, by number of ranks and flags."""
    return {}


@pytest.mark.weekly_cases(
    "recomputed without communication",  # with CoC in test_recompute_communication.py
    "half batches, context parallelism, multi-token prediction",
    "half batches, four ranks, dropout, recomputed",
    "lengths that vary",  # in test_coc.py, numbers of rows
    "tensor parallel, local spec, recomputed",
    "recomputed without all-reduces, local spec",
    "Megatron's flag, local spec",
    "sequence parallel, local spec, bf16",
    "latent attention, multi-token prediction",
    "stages, gathered output",
    "Megatron's flag",
    "sequence parallel",
)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_losses_and_bytes_are_those_without(ranks, tmp_path, case, plain_runs):
    world, flags, added = CASES[case]

    def run(name: str, more: str) -> Run:
        file, given = tmp_path / f"{name}.jsonl", [*flags.split(), *more.split()]
        job = (world, coc_ranks.trained, given, str(file))
        return *ranks(*job, setup=SETUP, backend=None, timeout=240)[0], metrics(file)

    if (world, flags) not in plain_runs:
        plain_runs[world, flags] = run("plain", "")
    calls, sent, losses = plain_runs[world, flags]
    our_calls, our_sent, our_losses = run("ours", added)
    bf16 = "--bf16" in flags
    norms = 5e-2 if bf16 else 1e-6 if added == HALVES else 1e-4
    for plain, ours in zip(losses, our_losses, strict=True):
        assert ours["lm_loss"] == pytest.approx(plain["lm_loss"], rel=1e-2 if bf16 else 1e-6)
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=norms)
    assert our_sent == sent
    assert sum(our_calls.values()) > 1.2 * sum(calls.values())
