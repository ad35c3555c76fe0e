"""A job killed at any moment leaves its last good checkpoint and resumes from it."""

from __future__ import annotations

import pytest

from mindspeed.testing import RankError
from tests.support import fault
from tests.support.trainer_job import SETUP, metrics, train

pytestmark = pytest.mark.slow

FLAGS = ["--tensor-model-parallel-size", "2", "--hidden-dropout", "0.1", "--train-iters", "12"]
FLAGS += ["--global-batch-size", "4"]
OPTIONS = {"setup": SETUP, "backend": None, "timeout": 300}


@pytest.fixture(scope="module")
def uninterrupted(rank_pool, tmp_path_factory):
    """Directory and results of a run that nobody kills."""
    whole = tmp_path_factory.mktemp("whole")
    return whole, rank_pool.run(2, train, [*FLAGS, "--save", str(whole)], **OPTIONS)


@pytest.mark.weekly_cases("0.35")
@pytest.mark.parametrize("seconds", [0.35, 0.8])
def test_a_killed_job_resumes_bit_equal_to_one_that_was_not(
    seconds, uninterrupted, ranks, tmp_path
):
    (whole, straight), killed = uninterrupted, tmp_path / "killed"
    save = ["--save", str(killed), "--save-interval", "1", "--auto-resume"]
    tracker = killed / "latest_checkpointed_iteration.txt"
    given = [*FLAGS, *save], fault.killed_after, str(tracker), seconds
    with pytest.raises(RankError) as died:
        ranks(2, train, *given, **OPTIONS)
    assert died.value.kind == "died"
    assert tracker.exists()
    resumed = ranks(2, train, [*FLAGS, *save], **OPTIONS)
    assert [r["digest"] for r in resumed] == [r["digest"] for r in straight]
    expected = [record["lm_loss"] for record in metrics(whole / "metrics.jsonl")]
    assert [record["lm_loss"] for record in metrics(killed / "metrics.jsonl")] == expected
