"""The trainer prints what Megatron-LM's ``pretrain_gpt.py`` prints, digit for digit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.megatron_lm_reference import LAYOUTS, RATES, as_printed
from tests.support.trainer_job import SETUP, metrics, printed, train

SLOW = {"one-rank", "data-2", "pipeline-2", "tensor-2-bf16"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS],
)
def test_loss_gradient_norm_and_rate_equal_megatron_lm_digit_for_digit(layout, ranks, tmp_path):
    world_size, flags, losses, norms = LAYOUTS[layout]
    file = tmp_path / "metrics.jsonl"
    results = ranks(
        world_size,
        train,
        [*flags, "--metrics-file", str(file)],
        setup=SETUP,
        backend=None,
        timeout=240,
    )
    assert [result["error"] for result in results] == [None] * world_size
    assert_printed(file, losses.split(), norms.split(), RATES)


@pytest.mark.slow
def test_validation_and_test_losses_equal_megatron_lm(ranks, tmp_path):
    file = tmp_path / "metrics.jsonl"
    flags = ["--tensor-model-parallel-size", "2", "--eval-interval", "3", "--eval-iters", "2"]
    ranks(2, train, [*flags, "--metrics-file", str(file)], setup=SETUP, backend=None, timeout=240)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    validation = [r["validation_loss"] for r in records if "validation_loss" in r]
    assert [f"{loss:.6E}" for loss in validation] == ["6.801507E+00", "6.726351E+00"]
    (test,) = [r["test_loss"] for r in records if "test_loss" in r]
    assert 6.6 < test < 6.8  # Megatron-LM validates once more before, which moves nothing here
    assert printed(file)[-1][0] == "6.693486E+00"


# Iteration -> loss, gradient norm, loss scale; the iterations between are skipped: overflow.
FP16 = {
    13: ("6.945987E+00", "0.719", 2097152.0),
    14: ("6.882636E+00", "0.748", 4194304.0),
    17: ("6.848951E+00", "0.631", 2097152.0),
    18: ("6.780656E+00", "0.846", 4194304.0),
    21: ("6.748514E+00", "0.728", 2097152.0),
}


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
    ranks(2, train, flags, setup=SETUP, backend=None, timeout=240)
    ours = {
        r["iteration"]: (f"{r['lm_loss']:.6E}", f"{r['grad_norm']:.3f}", r["loss_scale"])
        for r in metrics(file)
        if not r["skipped_iterations"]
    }
    assert ours == FP16


def assert_printed(file: Path, losses: list[str], norms: list[str], rates: list[str]) -> None:
    ours = printed(file)
    assert as_printed([record["lm_loss"] for record in metrics(file)]) == losses
    assert [norm for _, norm, _ in ours] == norms
    assert [rate for _, _, rate in ours] == rates
