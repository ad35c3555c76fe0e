"""benchmarks/attention.py runs from end to end and writes its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.benchmark import quick_run


@pytest.mark.weekly
@pytest.mark.slow
def test_quick_run_on_the_cpu(tmp_path: Path) -> None:
    quick_run("attention", tmp_path / "figures")
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    every = {"one process", "ring", "all_gather", "needed", "adaptive", "mesh", "ulysses"}
    assert {row["algorithm"] for row in rows if row["mask"] == "causal"} == {*every, "torch ring"}
    alone = {row["mask"]: row for row in rows if row["algorithm"] == "one process"}
    for row in rows:
        both = [sum(times) for times in zip(row["forward"], row["backward"], strict=True)]
        assert min(both) > 0
        assert row["balance"] == pytest.approx(sum(both) / len(both) / max(both))
        one = sum(sum(alone[row["mask"]][name]) for name in ("forward", "backward"))
        if row["algorithm"] != "one process":
            assert row["efficiency"] == pytest.approx(one / 4 / max(both))
