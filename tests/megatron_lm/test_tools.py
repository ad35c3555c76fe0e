"""The tools in an unmodified ``pretrain_gpt.py``: traces, executed FLOPs, determinism, no-ops."""

from __future__ import annotations

import re

import pytest

from tests.megatron_lm.launch import pretrain
from tests.megatron_lm.test_matrix import MODEL, TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

TOOLS = (
    "--profile --profile-step-start 2 --profile-step-end 4 --profile-ranks 1 "
    "--profile-save-path {traces} --op-cal-tflops --log-throughput --noop-layers 0,3 "
    "--use-deter-comp --pipeline-model-parallel-size 2"
)
EXECUTED = r"actual throughput per CPU \(TFLOP/s/CPU\): (\S+)"


def test_all_tools_together_and_two_runs_print_the_same_digits(tmp_path):
    runs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        flags = f"{MODEL} {TRAINING} {TOOLS.format(traces=tmp_path / name / 'traces')}"
        runs.append(pretrain(tmp_path / name, 2, *flags.split()))
    first, second = runs
    assert [path.name for path in (tmp_path / "first" / "traces").iterdir()] == [
        "rank1.steps2-3.pt.trace.json"
    ]
    assert "[rank 1] profile written to" in first.output
    assert len(re.findall(EXECUTED, first.output)) == 4
    assert len(first.losses) == 4
    assert first.losses == second.losses
    assert first.grad_norms == second.grad_norms
