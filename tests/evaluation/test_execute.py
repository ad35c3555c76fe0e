"""Programs that are wrong, leave early, do not end or want too much; test_isolation has attacks."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.evaluation import execute
from mindspeed.evaluation.execute import Limits, check, check_all

SHORT = Limits(seconds=3)


def test_a_right_program_passes_and_a_wrong_one_says_why():
    right, wrong = check_all(["assert 1 + 1 == 2", "assert 1 + 1 == 3, 'no'"])
    assert right == execute.Verdict(True, "passed")
    assert wrong == execute.Verdict(False, "AssertionError: no")


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "import os, sys; print('0' * 32); sys.stdout.flush(); os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.execv('/bin/true', ['true'])",
    ],
)
def test_ending_before_the_tests_is_no_pass(program):
    assert not check(f"{program}\nassert False", SHORT).passed


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_an_endless_program_is_ended(program):
    limits = Limits(seconds=1)
    assert check(program, limits).reason == "did not end within 1 seconds"


def test_four_gigabytes_are_refused():
    verdict = check("x = bytearray(4 << 30)", SHORT)
    assert verdict == execute.Verdict(False, "MemoryError")


def test_a_flood_of_output_is_stopped():
    started = check("while True: print('x' * 100_000)", Limits(seconds=5))
    assert not started.passed and "did not end" not in started.reason
    assert len(started.reason) <= 200


def test_nothing_of_our_environment_is_seen(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    program = "import os, sys\nassert 'SECRET_TOKEN' not in os.environ\nassert len(sys.argv) == 1"
    assert check(program, SHORT).passed
    assert not check("import numpy", SHORT).passed  # no site-packages either


def test_consent_is_asked_for():
    with pytest.raises(ConfigError, match="human_eval runs programs that the model writes"):
        execute.require_consent(False, "human_eval")
    execute.require_consent(True, "human_eval")
