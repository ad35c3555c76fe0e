"""Fold3D in the trainer: losses of Megatron's own schedule, chunks in another order."""

from __future__ import annotations

import pytest

from tests.support.trainer_job import runs

LAYOUT = (
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--train-iters 3 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--global-batch-size 16 --transformer-impl transformer_engine"
)


@pytest.fixture(scope="module")
def run(rank_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return runs(rank_pool, folder, lambda *flags: " ".join(flags).split())


@pytest.fixture(scope="module")
def expected(run):
    return run(4, LAYOUT)


@pytest.mark.weekly_cases("--fold-mode aiao", "--fold-mode fifo")
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["--fold-mode aiao", "--foldx-mode aiao --fold-order strict", "--fold-mode fifo"]
)
def test_losses_are_those_of_megatrons_schedule(run, expected, flags):
    found = run(4, LAYOUT, flags)
    assert len(found) == len(expected) == 3
    for mine, other in zip(found, expected, strict=True):
        assert mine["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
