"""What ``pretrain_gpt.py`` of Megatron-LM core_v0.16.1 printed for :data:`trainer_job.TINY`.

With the same flags and ``import mindspeed.megatron_adaptor`` added, on the CPU. By layout: ranks,
flags, losses, gradient norms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RATES = [
    "8.333334E-04",
    "6.666667E-04",
    "5.000000E-04",
    "3.333333E-04",
    "1.666667E-04",
    "0.000000E+00",
]
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


def as_printed(losses: Sequence[float]) -> list[str]:
    """Losses of iterations as Megatron-LM prints them.

    Its second line is the mean of iterations 1 and 2: the first print does not reset the sum, which
    is kept in single precision.
    """
    first_two = float(np.float32(losses[0]) + np.float32(losses[1])) / 2
    return [f"{loss:.6f}" for loss in (losses[0], first_two, *losses[2:])]
