"""benchmarks/pipeline.py and pipeline_prices.py run from end to end and write their files."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.support.benchmark import BENCHMARKS, quick_run, run


@pytest.mark.weekly
@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.json"
    printed = quick_run("pipeline", file)
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 12 == len(printed.splitlines()) - 4  # a title, and three starts
    for row in rows:
        assert 0 < row["simulated"] < row["measured"] < 1
        assert row["simulated"] < row["torch"] + 1e-9


@pytest.mark.slow
def test_no_schedule_of_torch_is_faster_within_the_same_memory(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    prices = importlib.import_module("pipeline_prices")
    found = prices.priced(4, 8)
    rows = {row["schedule"]: row for row in found["schedules"]}
    for theirs, kind in (("interleaved zero bubble", "zb-h1"), ("ZBV", "zb-v")):
        for times in ("equal", "unequal", "latency"):
            assert rows[kind][times] <= rows[theirs][times] + 1e-9
    least = min(row["memory"] for row in rows.values() if row["of"] != "ours")
    assert rows["v-min"]["memory"] < rows["v-half"]["memory"] < least == 4
    assert rows["zb-wave"]["equal"] < rows["zb-v"]["equal"]
    pairs = {row["schedule"]: row for row in found["pairs"]}
    for x in ("0.5", "0.75"):
        assert pairs["dualpipev"][x] <= pairs["DualPipeV"][x]
        assert pairs["nanopipe"][x] <= pairs["combined 1F1B"][x]


@pytest.mark.parametrize(("p", "m", "expected"), [(4, 16, 61.5), (8, 32, 123.5)])
def test_torchs_dualpipev_takes_a_forward_longer_than_ours(monkeypatch, p, m, expected) -> None:
    """Its table, as if its runtime overlapped the members of a pair."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    prices = importlib.import_module("pipeline_prices")
    costs = prices.Costs(exchange=0.5, layers=8)
    theirs = prices.of_torch("DualPipeV", p, 2, m)(costs)
    ours = prices.ours("dualpipev", p, 2, m, pairs=True)(costs)
    found = [prices.simulate(plan, costs).makespan for plan in (theirs, ours)]
    assert found == pytest.approx([expected, expected - 1])


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 2), (4, 2, 4), (4, 3, 8), (8, 2, 32)])
def test_megatrons_combined_order_is_ours(monkeypatch, p: int, v: int, m: int) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    prices = importlib.import_module("pipeline_prices")
    theirs = prices.of_megatron(p, v, m)(None)
    ours = prices.ours("interleaved", p, v, m, pairs=True)(prices.Costs())
    without_reductions = tuple(tuple(one for one in row if one.op != "G") for row in ours.rows)
    assert theirs.rows == without_reductions
    assert theirs.paired == ours.paired


@pytest.mark.slow
def test_executed_in_virtual_time(tmp_path: Path) -> None:
    file = tmp_path / "virtual.json"
    done = run("pipeline", "--virtual", "--ranks", 2, "--microbatches", 4, "--out", file)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {row["schedule"] for row in rows} >= {"1f1b", "v-half", "v-min", "wave", "zb-wave"}
    assert {row["exchange"] for row in rows} == {0.0, 0.5}
    for row in rows:
        assert row["executed"] == pytest.approx(row["simulated"], abs=1e-12)
