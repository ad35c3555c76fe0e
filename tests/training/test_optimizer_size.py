"""Bytes of the optimizer in the estimate against those that it keeps."""

from __future__ import annotations

import pytest

from tests.support.trainer_job import SETUP
from tests.training.optimizer_job import bytes_per_parameter, counted, estimated

SHARDED = "--use-distributed-optimizer"
LOW = "--quant-states fp8 --quant-grads --reuse-fp32-param"
CASES = {
    "fp32": "",
    "instances": f"{SHARDED} --num-distributed-optimizer-instances 2",
    "cadam": f"--bf16 --optimizer cadam {SHARDED}",
    "ema": f"--optimizer-selection fused_ema_adamw {SHARDED}",
    "swap": f"--bf16 --swap-optimizer {SHARDED}",
    "virtual": "--bf16 --virtual-optimizer all",
    "sgd": "--bf16 --optimizer sgd",
    "muon": "--bf16 --optimizer muon",
    "muon-by-layer": "--bf16 --optimizer dist_muon",
    "offload": f"--bf16 {SHARDED} --use-precision-aware-optimizer --optimizer-cpu-offload",
    "bf16-exact-sharded": f"--bf16 --reuse-fp32-param --reuse-fp32-param-exact {SHARDED}",
    "bf16-low": f"--bf16 {LOW}",
    "bf16-all-fp8": f"--bf16 {LOW} --no-quant-states-exempt",
    "bf16-moments": f"--bf16 {SHARDED} --use-precision-aware-optimizer --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype fp8 --no-store-param-remainders",
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_what_the_optimizer_keeps(rank_pool, case):
    words = [*CASES[case].split(), "--train-iters", "1"]
    given = {"setup": SETUP, "backend": None, "timeout": 240}
    results = rank_pool.run(2, counted, words, **given)
    (found,) = rank_pool.run(1, estimated, words, 2, **given)
    fullest = [max(kept) for kept in zip(*results, strict=True)]
    assert found == pytest.approx(fullest, rel=0.01)


# Flags -> bytes of states per parameter, and of gradient copies.
TABLE = {
    "": (8, 0),
    "--optimizer sgd": (4, 0),
    "--bf16": (12, 0),
    "--bf16 --reuse-fp32-param": (10, 0),
    "--bf16 --reuse-fp32-param --npu-deterministic": (10.125, 0),
    "--fp16": (12, 4),
    "--fp16 --release-fp32-grad": (12, 0),
    "--bf16 --grad-reduce-in-bf16": (12, 4),
    "--bf16 --quant-states fp8": (4 + 2 + 8 / 256, 0),
    f"--bf16 {LOW}": (2 + 2 + 8 / 256, 0),
    f"--bf16 {SHARDED} --use-precision-aware-optimizer": (10, 0),
    "--bf16 --optimizer cadam": (4 + 2 + 4 / 64, 0),
    "--bf16 --optimizer-selection fused_ema_adamw": (16, 0),
}


def test_bytes_per_parameter(rank_pool):
    given = {"setup": SETUP, "backend": None, "timeout": 120}
    (found,) = rank_pool.run(1, bytes_per_parameter, list(TABLE), **given)
    assert found == TABLE
