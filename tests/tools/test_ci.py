"""``.ci/run`` prints its summary and fails however a step ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
PASSED = "echo '=== 3 passed in 1.00s ==='"


@pytest.fixture
def start(tmp_path):
    """``start(test)``: `.ci/run` whose ``make test`` runs the shell code ``test``."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "run")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()

    def start(test: str, others: str = "true") -> subprocess.Popen[str]:
        make.write_text(f'#!/bin/bash\nif [ "$1" = test ]; then\n{test}\nelse\n{others}\nfi\n')
        make.chmod(0o755)
        environment = {**os.environ, "PATH": f"{make.parent}:{os.environ['PATH']}"}
        return subprocess.Popen(
            [tmp_path / ".ci" / "run"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


@pytest.mark.parametrize(
    ("test", "others", "status", "ending"),
    [
        (PASSED, "true", 0, "=== 3 passed in 1.00s ===\nall checks passed\n"),
        (f"{PASSED}; exit 1", "true", 1, "FAILED: test\n"),
        (PASSED, "exit 2", 1, "FAILED: test-avx2 fresh corners lint docs\n"),
        (
            "echo half; kill -9 $$",
            "true",
            1,
            "without a summary; their last lines:\nhalf\nFAILED: test\n",
        ),
    ],
    ids=["all pass", "a test fails", "the style fails", "the tests are killed"],
)
def test_the_summary_is_printed_last(start, test, others, status, ending):
    process = start(test, others)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == status
    assert output.endswith(ending)


def test_the_summary_is_printed_also_on_sigterm(start, tmp_path):
    process = start(f"echo running; touch {tmp_path}/started; sleep 60")
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 1
    assert output.endswith("running\nFAILED: test (stopped by a signal)\n")
