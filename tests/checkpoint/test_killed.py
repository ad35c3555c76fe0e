"""A job killed at any moment leaves its last good checkpoint and resumes from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.trainer_job import SETUP, TINY, metrics, train

pytestmark = pytest.mark.slow

FLAGS = ["--tensor-model-parallel-size", "2", "--hidden-dropout", "0.1", "--train-iters", "12"]


@pytest.fixture(scope="module")
def uninterrupted(rank_pool, tmp_path_factory):
    """Directory and results of a run that nobody kills."""
    whole = tmp_path_factory.mktemp("whole")
    flags = [*FLAGS, "--save", str(whole)]
    return whole, rank_pool.run(2, train, flags, setup=SETUP, backend=None, timeout=300)


@pytest.mark.parametrize("seconds", [0.35, 0.8])
def test_a_killed_job_resumes_bit_equal_to_one_that_was_not(
    seconds, uninterrupted, ranks, tmp_path
):
    (whole, straight), killed = uninterrupted, tmp_path / "killed"
    save = ["--save", str(killed), "--save-interval", "1", "--auto-resume"]
    environment = {**os.environ, "MINDSPEED_DEVICE": "cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    job = subprocess.Popen(
        [sys.executable, "-m", "mindspeed", "pretrain", *TINY, *FLAGS, *save],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    tracker = killed / "latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + 300
    while not tracker.exists() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(seconds)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    assert tracker.exists()
    resumed = ranks(2, train, [*FLAGS, *save], setup=SETUP, backend=None, timeout=300)
    assert [r["digest"] for r in resumed] == [r["digest"] for r in straight]
    expected = [record["lm_loss"] for record in metrics(whole / "metrics.jsonl")]
    assert [record["lm_loss"] for record in metrics(killed / "metrics.jsonl")] == expected
