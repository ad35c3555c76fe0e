"""Validation saves nothing for a backward pass, and changes nothing in training."""

from __future__ import annotations

import pytest

from tests.support.trainer_job import SETUP, train
from tests.training.matrix_job import modes_of_passes

OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
EXPERT_BIAS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1 "
    "--moe-router-load-balancing-type none --moe-ffn-hidden-size 32 "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
)


def test_validation_runs_in_evaluation_mode_without_gradients(ranks):
    flags = ["--train-iters", "2", "--eval-interval", "1", "--eval-iters", "1"]
    flags += ["--pipeline-model-parallel-size", "2", "--global-batch-size", "2"]
    for modes in ranks(2, modes_of_passes, flags, setup=SETUP, backend=None, timeout=240):
        assert set(modes) == {(True, True), (False, False)}
        assert modes[:4] == [(True, True)] * 2 + [(False, False)] * 2


@pytest.mark.weekly_cases("overlap", "bias")
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [OVERLAP, EXPERT_BIAS, f"{EXPERT_BIAS} {OVERLAP}"],
    ids=["overlap", "bias", "bias-overlap"],
)
def test_training_beside_validation_has_the_same_weights(ranks, flags):
    """A validation neither gathers stale parameters nor counts tokens of experts."""

    def digests(eval_iters):
        given = [*flags.split(), "--train-iters", "3", "--eval-interval", "1"]
        given += ["--eval-iters", str(eval_iters), "--global-batch-size", "4"]
        results = ranks(2, train, given, setup=SETUP, backend=None, timeout=240)
        assert [result["error"] for result in results] == [None, None]
        return [result["digest"] for result in results]

    assert digests(2) == digests(0)
