"""Flags that save memory of activations, with an unmodified ``pretrain_gpt.py``."""

from __future__ import annotations

import re

import pytest

from tests.megatron_lm.launch import pretrain
from tests.megatron_lm.test_matrix import MODEL, TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

BOTH = "--recompute-norm --recompute-activation-function"
STAGES = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PLAN = "all: {mlp.activation: recompute_output, self_attention: offload}\n1: {layer: recompute}\n"
# Flags of a run, and those that are added to it, in a run for each.
CASES = {
    "tensor parallel": (f"--bf16 {TENSOR}", BOTH),
    "stages": (f"--bf16 {STAGES} {BLOCK}", f"{BOTH} --enable-recompute-layers-per-pp-rank"),
    "recomputation without communication": (
        f"--bf16 {TENSOR} --use-distributed-optimizer --overlap-grad-reduce --hidden-dropout 0.1",
        f"{UNIFORM} --optimize-recomp-communication-level 2",
    ),
    "mlp without communication": (
        f"--bf16 {TENSOR} --transformer-impl local",
        "--recompute-granularity selective --recompute-modules mlp core_attn "
        "--optimize-recomp-communication-level 1",
    ),
    "recomputation on a schedule": (
        f"--bf16 {STAGES} --overlap-grad-reduce --hidden-dropout 0.1 --attention-dropout 0.1",
        "--recompute-in-bubble --pipeline-schedule-dump {}",
        f"{BLOCK} --recompute-in-advance --pipeline-schedule-dump {{}}",
    ),
    "plan": ("--bf16 --use-distributed-optimizer --overlap-grad-reduce", "--activation-plan {}"),
}


@pytest.mark.parametrize("case", CASES)
def test_printed_losses_are_those_of_a_run_without_it(tmp_path, case):
    given, *additions = CASES[case]
    base = f"{MODEL} {TRAINING} {given}"
    plain = pretrain(tmp_path, 2, *base.split())
    for added in additions:
        file = tmp_path / "plan"  # read or written
        file.write_text(PLAN)
        other = pretrain(tmp_path, 2, *base.split(), *added.format(file).split())
        assert other.losses == plain.losses and other.grad_norms == plain.grad_norms
        if "--recompute-in-" in added:
            first, *_ = file.read_text().splitlines()
            assert re.findall(r"\d+Fc\d+", first) and re.findall(r"\d+R\d+", first)
