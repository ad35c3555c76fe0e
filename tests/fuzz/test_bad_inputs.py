"""Bad inputs over all commands: no traceback, no signal, no silent success, nothing endless.

Another seed finds other inputs: ``python -m tests.fuzz.run_bad_inputs SEED COUNT EMPTY_DIRECTORY``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import HUGE_PAGES

ROOT = Path(__file__).parents[2]


def run(seed: int, count: int, directory: Path) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.fuzz.run_bad_inputs",
            str(seed),
            str(count),
            str(directory),
        ],
        cwd=ROOT,
        env=environment | HUGE_PAGES | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_few_known_bad_inputs(tmp_path):
    result = run(0, 24, tmp_path)
    assert result["ran"] >= 24
    assert result["wrong"] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hundreds_of_bad_inputs(tmp_path):
    result = run(0, 800, tmp_path)
    assert result["ran"] == 800
    assert result["wrong"] == [], json.dumps(result["wrong"][:10], indent=1)
