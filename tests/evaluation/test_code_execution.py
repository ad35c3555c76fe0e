"""Programs that fail, exit early, do not end or exceed limits; attacks are in test_isolation."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.evaluation import code_execution
from mindspeed.evaluation.code_execution import ResourceLimits, run_program, run_programs

SHORT = ResourceLimits(seconds=3)


def test_a_right_program_passes_and_a_wrong_one_says_why():
    right, wrong = run_programs(["assert 1 + 1 == 2", "assert 1 + 1 == 3, 'no'"])
    assert right == code_execution.ProgramResult(True, "passed")
    assert wrong == code_execution.ProgramResult(False, "AssertionError: no")


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
    assert not run_program(f"{program}\nassert False", SHORT).passed


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_an_endless_program_is_ended(program):
    limits = ResourceLimits(seconds=1)
    assert run_program(program, limits).reason == "did not end within 1 seconds"


def test_four_gigabytes_are_refused():
    verdict = run_program("x = bytearray(4 << 30)", SHORT)
    assert verdict == code_execution.ProgramResult(False, "MemoryError")


def test_a_flood_of_output_is_stopped():
    started = run_program("while True: print('x' * 100_000)", ResourceLimits(seconds=5))
    assert not started.passed and "did not end" not in started.reason
    assert len(started.reason) <= 200


def test_our_environment_is_hidden_from_programs(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    program = "import os, sys\nassert 'SECRET_TOKEN' not in os.environ\nassert len(sys.argv) == 1"
    assert run_program(program, SHORT).passed
    assert not run_program("import numpy", SHORT).passed  # no site-packages either


def test_consent_is_required():
    with pytest.raises(ConfigError, match="human_eval runs programs that the model writes"):
        code_execution.require_consent(False, "human_eval")
    code_execution.require_consent(True, "human_eval")
