"""benchmarks/pipeline.py runs from end to end and writes its file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pipeline.py"


@pytest.mark.weekly
@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 10 == len(done.stdout.splitlines()) - 4  # a title, and three starts
    for row in rows:
        assert 0 < row["simulated"] < row["measured"] < 1
        assert row["simulated"] < row["torch"] + 1e-9
