"""benchmarks/tensor_parallel.py runs from end to end and writes its files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tensor_parallel.py"


@pytest.mark.weekly
@pytest.mark.slow
def test_quick_run_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(tmp_path / "tp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "tp.json").read_text())["rows"]
    assert (tmp_path / "tp.png").read_bytes().startswith(b"\x89PNG")
    assert len(rows) == 2 * 3 * 4  # operations, ratios, numbers of parts
    one = [row["bound"] for row in rows if row["strategy"] == "1 parts" and row["ratio"] == 2]
    assert all(row["seconds"] > 0 for row in rows) and len(set(one)) == 1
