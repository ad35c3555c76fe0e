"""Validation saves nothing for a backward pass."""

from __future__ import annotations

from tests.support.trainer_job import SETUP
from tests.training.matrix_job import modes_of_passes


def test_validation_runs_in_evaluation_mode_without_gradients(ranks):
    flags = ["--train-iters", "2", "--eval-interval", "1", "--eval-iters", "1"]
    flags += ["--pipeline-model-parallel-size", "2", "--global-batch-size", "2"]
    for modes in ranks(2, modes_of_passes, flags, setup=SETUP, backend=None, timeout=240):
        assert set(modes) == {(True, True), (False, False)}
        assert modes[:4] == [(True, True)] * 2 + [(False, False)] * 2
