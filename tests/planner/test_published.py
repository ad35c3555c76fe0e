"""The blind test of predicted times: the committed figures are those of the published rows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def benchmark():
    """The script that plans the rows."""
    spec = importlib.util.spec_from_file_location("planner_rows", ROOT / "benchmarks/planner.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def result(benchmark) -> Any:
    """What it wrote."""
    return json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))


def test_rows_are_whole(benchmark):
    rows = benchmark.published()
    assert len(rows) == 268
    for row in rows:
        layout = [int(row[name]) for name in ("devices", "tp", "pp", "cp", "vpp", "ep")]
        assert min(layout) >= 1 and layout[0] % (layout[1] * layout[2] * layout[3]) == 0
        assert float(row["tokens_per_second_per_device"]) > 0


def test_every_row_is_predicted_refused_or_left_out(benchmark, result):
    rows = benchmark.published()
    planned = [row for row in rows if benchmark.left_out(row) is None]
    assert len(result["predictions"]) + len(result["refused"]) == len(planned)
    assert sum(result["left_out"].values()) == len(rows) - len(planned)


def test_predictions_are_of_published_rows(benchmark, result):
    known = {
        (r["release"], r["model"], r["system"], float(r["tokens_per_second_per_device"]))
        for r in benchmark.published()
    }
    for one in result["predictions"]:
        assert (one["release"], one["model"], one["system"], one["published"]) in known


def test_summary_follows_from_the_predictions(benchmark, result):
    rows = [benchmark.Row(**one) for one in result["predictions"]]
    assert benchmark.summary(rows) == result["summary"]


def test_error_is_what_was_measured(result):
    """Blind: nothing is fitted to these rows. The bounds are a little above what was measured."""
    assert result["summary"]["all"]["mape"] <= 0.07
    assert result["summary"]["all"]["spearman"] >= 0.95


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [40, 30, 20, 10], -1.0),
        ([1, 2, 2, 3], [1, 3, 2, 4], 0.9487),
        ([1, 1, 1], [1, 2, 3], None),
    ],
)
def test_rank_correlation(benchmark, one, other, expected):
    """The third value is that of scipy.stats.spearmanr."""
    assert benchmark.spearman(one, other) == expected
