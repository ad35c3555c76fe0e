"""Bytes of the optimizer that the planner counts against those that it keeps."""

from __future__ import annotations

import pytest

from tests.support.trainer_job import SETUP
from tests.training.optimizer_job import counted, planned

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


# In tests/planner/test_counts.py with all else that ranks keep.
@pytest.mark.weekly_cases(
    "swap",
    "muon-by-layer",
    "bf16-exact-sharded",
    "bf16-all-fp8",
    "instances",
    "fp32",
    "ema",
    "bf16-moments",
)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_planner_counts_what_the_optimizer_keeps(rank_pool, case):
    words = [*CASES[case].split(), "--train-iters", "1"]
    given = {"setup": SETUP, "backend": None, "timeout": 240}
    real = rank_pool.run(2, counted, words, **given)
    (found,) = rank_pool.run(1, planned, words, 2, **given)
    assert found["kept"] == pytest.approx(real[0], rel=0.01)
    assert bool(found["note"]) == (real[0] != pytest.approx(real[1], rel=0.01))
