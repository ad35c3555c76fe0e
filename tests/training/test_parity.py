"""The trainer's losses, gradient norms, rates and loss scales are those of ``pretrain_gpt.py``.

Megatron-LM's figures are of another processor; ``tests/megatron_lm/test_core_script.py`` compares
with a script over megatron.core in the same run.
"""

from __future__ import annotations

import json

import pytest

from tests.support.megatron_lm_reference import (
    FP16,
    LAYOUTS,
    VALIDATION,
    as_printed,
    assert_losses,
    assert_norms,
)
from tests.support.trainer_job import SETUP, metrics, train, whole_mock_data

SLOW = {"one-rank", "data-2", "pipeline-2", "tensor-2-bf16"}


@pytest.mark.weekly_cases("tensor-2", "virtual-pipeline-2", "tensor-2-pipeline-2", "data-2")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS],
)
def test_loss_gradient_norm_and_rate_equal_megatron_lm(layout, ranks, tmp_path):
    world_size, flags, _, _ = LAYOUTS[layout]
    file = tmp_path / "metrics.jsonl"
    results = ranks(
        world_size,
        train,
        [*flags, "--metrics-file", str(file)],
        whole_mock_data,
        setup=SETUP,
        backend=None,
        timeout=240,
    )
    assert [result["error"] for result in results] == [None] * world_size
    records, bf16 = metrics(file), "--bf16" in flags
    assert len(records) == 6
    assert_losses(as_printed([record["lm_loss"] for record in records]), layout, bf16=bf16)
    assert_norms([record["grad_norm"] for record in records], layout, bf16=bf16)
    # The rate of its own iteration; Megatron-LM's line has that of the next one.
    falling = [1e-3 * (7 - iteration) / 6 for iteration in range(1, 7)]
    assert [record["learning_rate"] for record in records] == pytest.approx(falling, rel=1e-6)


@pytest.mark.slow
def test_validation_and_test_losses_equal_megatron_lm(ranks, tmp_path):
    file = tmp_path / "metrics.jsonl"
    flags = ["--tensor-model-parallel-size", "2", "--eval-interval", "3", "--eval-iters", "2"]
    flags += ["--metrics-file", str(file)]
    ranks(2, train, flags, whole_mock_data, setup=SETUP, backend=None, timeout=240)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    validation = [r["validation_loss"] for r in records if "validation_loss" in r]
    assert validation == pytest.approx(VALIDATION, rel=1e-5)
    (test,) = [r["test_loss"] for r in records if "test_loss" in r]
    assert 6.6 < test < 6.8  # Megatron-LM validates once more before, which moves nothing here
    assert_losses([metrics(file)[-1]["lm_loss"]], "tensor-2", first=6)


@pytest.mark.slow
def test_dynamic_loss_scaling_skips_and_grows_as_megatron_lm(ranks, tmp_path):
    file = tmp_path / "metrics.jsonl"
    flags = [
        "--tensor-model-parallel-size",
        "2",
        "--fp16",
        "--train-iters",
        "24",
        "--loss-scale-window",
        "2",
    ]
    flags += ["--exit-interval", "21", "--metrics-file", str(file)]
    ranks(2, train, flags, whole_mock_data, setup=SETUP, backend=None, timeout=240)
    updates = {r["iteration"]: r for r in metrics(file) if not r["skipped_iterations"]}
    assert list(updates) == list(FP16)
    for iteration, (loss, norm, scale) in FP16.items():
        assert updates[iteration]["lm_loss"] == pytest.approx(loss, rel=1e-4)
        assert updates[iteration]["grad_norm"] == pytest.approx(norm, abs=5e-3)
        assert updates[iteration]["loss_scale"] == scale
