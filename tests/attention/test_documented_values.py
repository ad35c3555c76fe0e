"""The numbers stated in docs/attention-plans.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed.attention import HeadAllToAll, Plan, contiguous, cost_metrics, plan
from mindspeed.attention.cost_metrics import calls_per_stage
from tests.attention.reference_planners import mask_of, pretraining

PAGE = Path(__file__).resolve().parents[2] / "docs" / "attention-plans.md"
SIZE, RANKS = 1 << 17, 8


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def measured(made: Plan) -> tuple[float, float, float, int]:
    price, others = cost_metrics(made), SIZE - SIZE // RANKS
    worst, mean = max(price.kv_received) / others, sum(price.kv_received) / RANKS / others
    return price.balance, worst, mean, max(map(max, calls_per_stage(made)))


def test_documented_rows_received() -> None:
    lengths = pretraining(SIZE, 0)
    assert len(lengths) == 106
    mask, told = mask_of(lengths), {}
    for name, balance, keys, count in rows("Which rows are sent"):
        algorithm = re.match(r"`(\w+)`", name)[1]
        worst, mean = (float(part) for part in keys.split("/"))
        told[algorithm] = float(balance), worst, mean, int(count)
    assert list(told) == ["ring", "all_gather", "needed", "mesh", "adaptive"]
    for algorithm, figures_ in told.items():
        got = measured(plan(mask, RANKS, algorithm))
        assert got[:3] == pytest.approx(figures_[:3], abs=0.006), algorithm
        assert got[3] == figures_[3], algorithm


def test_heads_that_are_left_over() -> None:
    (_, whole), (_, shared) = rows("Ulysses")
    split = HeadAllToAll(contiguous(SIZE, RANKS), 0, None)
    assert split.balance(28) == float(whole)
    assert split.balance(24) == float(shared) == 1
