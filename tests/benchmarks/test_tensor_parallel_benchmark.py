"""benchmarks/tensor_parallel.py runs from end to end and writes its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.benchmark import quick_run


@pytest.mark.weekly
@pytest.mark.slow
def test_quick_run_on_the_cpu(tmp_path: Path) -> None:
    quick_run("tensor_parallel", tmp_path / "tp")
    rows = json.loads((tmp_path / "tp.json").read_text())["rows"]
    assert (tmp_path / "tp.png").read_bytes().startswith(b"\x89PNG")
    assert len(rows) == 2 * 3 * 4  # operations, ratios, numbers of parts
    one = [row["bound"] for row in rows if row["strategy"] == "1 parts" and row["ratio"] == 2]
    assert all(row["seconds"] > 0 for row in rows) and len(set(one)) == 1
