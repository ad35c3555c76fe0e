"""Unmodified ``pretrain_gpt.py`` prints the same digits with ``--pipeline-schedule`` as without.

Dropout is on, evaluation runs, and data-parallel reduction overlaps.
"""

from __future__ import annotations

import re

import pytest

from tests.megatron_lm.launch import pretrain
from tests.megatron_lm.test_matrix import MODEL, TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

JOB = (
    f"{MODEL} {TRAINING} --attention-dropout 0.1 --hidden-dropout 0.1 --eval-iters 1 "
    "--eval-interval 2 --pipeline-model-parallel-size 2"
)
CHUNKS = "--num-layers-per-virtual-pipeline-stage 1"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def figures(folder, flags):
    run = pretrain(folder, 4, *flags.split())
    validation = re.findall(r"validation loss at iteration \d+ .*?lm loss value: (\S+)", run.output)
    assert validation
    return run.losses, run.grad_norms, validation


def test_losses_are_those_of_megatrons_schedule(tmp_path):
    flags, dump = f"{JOB} {CHUNKS} {OVERLAP}", tmp_path / "plan.csv"
    expected = figures(tmp_path, flags)
    more = f"--pipeline-schedule nanopipe --pipeline-schedule-dump {dump}"
    assert figures(tmp_path, f"{flags} {more}") == expected
    assert dump.read_text().startswith("0F0")


def test_impossible_schedules_are_refused_before_training(tmp_path):
    with pytest.raises(AssertionError) as caught:
        pretrain(tmp_path, 2, *f"{JOB} --pipeline-schedule interleaved".split())
    assert "--num-layers-per-virtual-pipeline-stage" in str(caught.value)
    assert "iteration" not in str(caught.value)
