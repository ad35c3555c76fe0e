"""What ``mindspeed pretrain`` prints: the log, what comes next, and nothing else."""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings

import pytest

from tests.support import commands_job, forked
from tests.support.trainer_job import TINY

ROOT = re.compile(r"mindspeed: warning: running as root.*\n")


def launched(words: list[str]) -> tuple[int, str]:
    """Status and text of a command whose ranks are new interpreters; it is none of them itself."""
    unset = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in (*unset, "PYTHONWARNINGS"):
        os.environ.pop(name, None)
    return forked.run(words)


def first_words(output: str) -> list[str]:
    """Of each line."""
    return [" ".join(line.split()[:2]) for line in output.splitlines()]


LOG = [
    *("iteration 1/", "iteration 2/", "saved iteration", "trained to"),
    *("continue mindspeed", "generate mindspeed", "draw mindspeed"),
]


@pytest.mark.slow
def test_a_job_prints_one_log_and_no_warnings(ranks, tmp_path):
    """The launcher is a fork, its ranks are new interpreters, which import everything."""
    words = ["pretrain", *TINY, "--nproc", "2", "--train-iters", "2", "--save", str(tmp_path)]
    words += ["--transformer-impl", "transformer_engine", "--use-distributed-optimizer"]
    options = {"setup": commands_job.SETUP, "backend": None, "timeout": 600}
    [(status, text)] = ranks(1, launched, words, **options)
    assert status == 0, text
    assert first_words(ROOT.sub("", text)) == LOG


def test_a_training_with_the_local_spec_prints_one_log_and_no_warnings(ranks, tmp_path):
    """In a fork: what imports warn of is in the test above."""
    words = ["pretrain", *TINY, "--transformer-impl", "local", "--train-iters", "2"]
    words += ["--nproc", "1", "--save", str(tmp_path)]
    ((status, output, errors),) = ranks(
        1, commands_job.run, words, setup=commands_job.SETUP, backend=None, timeout=240
    )
    assert (status, ROOT.sub("", errors)) == (0, "")
    assert first_words(output) == LOG


def warned_at_import(requested: bool) -> list[str]:
    """What a module of Megatron warns of that is imported after the command has begun."""
    sys.warnoptions[:] = ["default"] * requested  # of PYTHONWARNINGS or -W
    warnings.resetwarnings()
    status, _, errors = commands_job.run(["pretrain", *TINY, "--nproc", "1", "--dry-run"])
    assert status == 0, errors
    with warnings.catch_warnings(record=True) as shown:
        importlib.reload(sys.modules["megatron.core.models.backends"])
    return [str(warning.message) for warning in shown]


@pytest.mark.slow
def test_requested_warnings_are_shown(ranks):
    options = {"setup": commands_job.SETUP, "backend": None}
    [requested] = ranks(1, warned_at_import, True, **options)
    assert "Apex is not installed" in requested[0]
    assert ranks(1, warned_at_import, False, **options) == [[]]
