"""Flags that save memory of the optimizer, with an unmodified ``pretrain_gpt.py``."""

from __future__ import annotations

import pytest

from tests.megatron_lm.launch import pretrain
from tests.megatron_lm.test_matrix import MODEL, TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

FP16 = "--fp16 --initial-loss-scale 65536"
SHARDED = "--use-distributed-optimizer"
LOW = "--reuse-fp32-param --quant-states fp8 --quant-grads"
# Flags of a run, those that are added to it, and how far printed losses may differ.
CASES = {
    "fused": ("--bf16", "--optimizer fused_adam --optimizer-selection fused_torch_adamw", 0),
    "exact": (f"--bf16 {SHARDED}", "--reuse-fp32-param --reuse-fp32-param-exact", 0),
    "reuse": ("--bf16", "--reuse-fp32-param", 1e-4),
    "release": (FP16, "--release-fp32-grad", 0),
    "low": (f"--bf16 {SHARDED}", LOW, 2e-3),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_run_without_it(tmp_path, case):
    given, added, tolerance = CASES[case]
    base = f"{MODEL} {TRAINING} {given}"
    plain = pretrain(tmp_path, 2, *base.split())
    other = pretrain(tmp_path, 2, *base.split(), *added.split())
    assert other.losses == pytest.approx(plain.losses, abs=tolerance)
    if not tolerance:
        assert other.grad_norms == plain.grad_norms


@pytest.mark.parametrize("format_", ["torch", "torch_dist"])
def test_a_run_with_remainders_continues_without_them(tmp_path, format_):
    base = f"{MODEL} {TRAINING} --bf16 {SHARDED} --ckpt-format {format_}"
    save = f"--save {tmp_path / 'c'} --save-interval 2"
    exact = "--reuse-fp32-param --reuse-fp32-param-exact"
    straight = pretrain(tmp_path, 2, *f"{base} {save} {exact}".split())
    (tmp_path / "c" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = pretrain(tmp_path, 2, *f"{base} --load {tmp_path / 'c'}".split())
    assert resumed.losses == straight.losses[2:]
