"""The trainer prints what Megatron-LM's ``pretrain_gpt.py`` prints, digit for digit.

The figures below were printed by ``pretrain_gpt.py`` of Megatron-LM core_v0.16.1 with the same
flags and ``import mindspeed.megatron_adaptor`` added. Its second line is the mean of iterations 1
and 2 (the first print does not reset its sum), so that one is compared as a mean.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.trainer_job import SETUP, metrics, printed, train

RATES = ["8.333334E-04", "6.666667E-04", "5.000000E-04", "3.333333E-04", "1.666667E-04"]
LAYOUTS = {
    "one-rank": (
        1,
        [],
        "6.950367 6.934482 6.800383 6.819465 6.728707 6.688148",
        "0.717 0.717 0.777 0.762 0.716 0.677",
    ),
    "tensor-2": (
        2,
        ["--tensor-model-parallel-size", "2"],
        "6.956708 6.945219 6.792150 6.822842 6.743383 6.693486",
        "0.724 0.733 0.787 0.766 0.750 0.715",
    ),
    "tensor-2-sequence-parallel-transformer-engine": (
        2,
        [
            "--tensor-model-parallel-size",
            "2",
            "--sequence-parallel",
            "--transformer-impl",
            "transformer_engine",
        ],
        "6.956708 6.945219 6.792150 6.822842 6.743383 6.693486",
        "0.724 0.733 0.787 0.766 0.750 0.715",
    ),
    "tensor-2-bf16": (
        2,
        ["--tensor-model-parallel-size", "2", "--bf16"],
        "6.956769 6.945433 6.792105 6.823132 6.743702 6.693765",
        "0.725 0.734 0.790 0.766 0.750 0.714",
    ),
    "pipeline-2": (
        2,
        ["--pipeline-model-parallel-size", "2"],
        "6.955606 6.933264 6.790021 6.815773 6.724982 6.693392",
        "0.726 0.710 0.790 0.779 0.738 0.929",
    ),
    "virtual-pipeline-2": (
        2,
        ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
        "6.954556 6.933397 6.790249 6.817888 6.728312 6.696329",
        "0.716 0.707 0.794 0.767 0.766 0.979",
    ),
    "data-2": (
        2,
        [],
        "6.950367 6.934482 6.800382 6.819464 6.728708 6.688148",
        "0.717 0.717 0.777 0.762 0.716 0.677",
    ),
    "data-2-distributed-optimizer": (
        2,
        ["--use-distributed-optimizer"],
        "6.950367 6.934482 6.800382 6.819464 6.728708 6.688148",
        "0.717 0.717 0.777 0.762 0.716 0.677",
    ),
    "tensor-2-pipeline-2": (
        4,
        ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
        "6.946709 6.926455 6.789697 6.815320 6.740180 6.677775",
        "0.716 0.687 0.794 0.722 0.777 0.657",
    ),
}


SLOW = {"one-rank", "data-2", "pipeline-2", "tensor-2-bf16"}


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
    assert_printed(file, losses.split(), norms.split(), [*RATES, "0.000000E+00"])


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
    true = [record["lm_loss"] for record in metrics(file)]
    expected = [f"{float(loss):.6E}" for loss in losses]
    assert [loss for loss, _, _ in ours[:1] + ours[2:]] == expected[:1] + expected[2:]
    both = np.float32(true[0]) + np.float32(true[1])  # Megatron-LM adds in single precision
    assert f"{float(both) / 2:.6E}" == expected[1]
    assert [norm for _, norm, _ in ours] == norms
    assert [rate for _, _, rate in ours] == rates
