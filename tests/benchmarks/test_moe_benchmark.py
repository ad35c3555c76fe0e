"""benchmarks/moe.py runs from end to end and writes its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.benchmark import BENCHMARKS, quick_run, run

RESULTS = BENCHMARKS / "results" / "cpu-moe-counts.json"


@pytest.mark.weekly
@pytest.mark.slow
def test_counts_are_those_of_the_results(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    done = run("moe", "--counts", "--out", file)
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text()) == json.loads(RESULTS.read_text())


@pytest.mark.weekly
@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "moe.json"
    printed = quick_run("moe", file)
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == len(printed.splitlines()) - 1
    names = {row["program"] for row in rows}
    assert {"megatron", "async", "overlap", "overlap-level1", "dedup", "pieces"} <= names
    assert {"allgather", "allgather-async", "allgather-overlap"} <= names
    assert len(rows) == 2 * 2 * len(names)
    for row in rows:
        assert row["seconds"] > 0 and 0 <= row["waiting"] < row["simulated"]
