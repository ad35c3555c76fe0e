"""What ``pretrain_gpt.py`` of Megatron-LM core_v0.16.1 printed for :data:`trainer_job.TINY`.

With the same flags and ``import mindspeed.megatron_adaptor`` added, on one CPU, with all of
Megatron's mock data (:func:`tests.support.trainer_job.whole_mock_data`). By layout: ranks,
flags, losses, gradient norms. Another processor adds in another order and prints other last
digits, so these figures are compared within the tolerances of :func:`assert_losses`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

VALIDATION = [6.801507, 6.726351]
"""Validation losses of the layout tensor-2 after iterations 3 and 6."""
FP16 = {
    13: (6.945987, 0.719, 2.0**21),
    14: (6.882636, 0.748, 2.0**22),
    17: (6.848951, 0.631, 2.0**21),
    18: (6.780656, 0.846, 2.0**22),
    21: (6.748514, 0.728, 2.0**21),
}
"""tensor-2 with --fp16 --loss-scale-window 2: loss, gradient norm and scale of iterations that
update; those between are skipped for overflow."""
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


def as_printed(losses: Sequence[float]) -> list[float]:
    """Losses of iterations as Megatron-LM prints them.

    Its second line is the mean of iterations 1 and 2: the first print does not reset the sum.
    """
    return [losses[0], (losses[0] + losses[1]) / 2, *losses[2:]]


def assert_losses(
    found: Sequence[float], layout: str, first: int = 1, *, bf16: bool = False
) -> None:
    """Compare losses of consecutive iterations with Megatron-LM's of a layout.

    Orders of fp32 sums move a loss by 1e-6 in these six steps (AVX2 to AMX), roundings to bf16 by
    1e-4; a step with wrong data, rate, state or gradient moves it by 1e-3.

    Args:
        found: losses as Megatron-LM prints them (:func:`as_printed`).
        layout: key of :data:`LAYOUTS`.
        first: iteration of the first loss.
        bf16: the model computes in bf16.
    """
    expected = [float(loss) for loss in LAYOUTS[layout][2].split()][first - 1 :][: len(found)]
    assert list(found) == pytest.approx(expected, rel=2e-4 if bf16 else 1e-5)


def assert_norms(
    found: Sequence[float], layout: str, first: int = 1, *, bf16: bool = False
) -> None:
    """Compare gradient norms like :func:`assert_losses`; the recorded ones have three digits."""
    expected = [float(norm) for norm in LAYOUTS[layout][3].split()][first - 1 :][: len(found)]
    assert list(found) == pytest.approx(expected, abs=5e-3 if bf16 else 1e-3)
