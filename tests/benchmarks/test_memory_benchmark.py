"""benchmarks/memory.py runs from end to end and writes its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.benchmark import quick_run
from tests.support.lazy import needs

needs("megatron.core")


@pytest.mark.weekly
@pytest.mark.slow
def test_quick_run_on_the_cpu(tmp_path: Path) -> None:
    quick_run("memory", tmp_path / "memory")
    rows = json.loads((tmp_path / "memory.json").read_text())["rows"]
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    kept = {row["way"]: row["device_bytes"] for row in rows}
    assert all(row["equal"] and row["seconds"] > 0 for row in rows)
    assert kept["plan: layers recomputed"] == kept["Megatron: full"] < kept["both"]
    assert kept["both"] < kept["--recompute-norm"] < kept["keep everything"]
    assert not list(tmp_path.glob("*.plan.json"))
