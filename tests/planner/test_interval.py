"""Intervals of predicted seconds: how often they contain a published run."""

from __future__ import annotations

import csv
from argparse import Namespace
from pathlib import Path

import pytest

from mindspeed.planner.interval import (
    JobKind,
    Run,
    interval_of,
    job_kind,
    percentile,
    published_runs,
)

RESULTS = Path(__file__).parents[2] / "benchmarks/results/planner-published.csv"


def contained(run: Run, same: str) -> bool:
    """Whether the interval of a run contains it, if others with the same property do not count."""
    own = getattr(run, same)
    found = interval_of(run.kind, run.device, lambda other: getattr(other, same) == own)
    return found.low <= run.ratio <= found.high


@pytest.mark.parametrize("same", ["model", "layout"])
def test_more_than_90_percent_of_the_published_runs_are_inside(same: str) -> None:
    """Also runs of models and layouts that the interval does not know."""
    runs = published_runs()
    inside = sum(contained(run, same) for run in runs)
    assert 0.9 * len(runs) < inside < len(runs)


def test_runs_of_models_with_experts_are_inside_too() -> None:
    runs = [run for run in published_runs() if run.kind.experts]
    inside = sum(contained(run, "layout") for run in runs)
    assert 0.9 * len(runs) < inside


def test_few_runs_alike_make_an_interval_wide() -> None:
    """A job that is like no run in anything may be anywhere between the extremes."""
    everything = [run.ratio for run in published_runs()]
    alone = interval_of(JobKind(True, "nvfp4"), "mine", lambda run: run.device != "b300")
    few = [run.ratio for run in published_runs() if run.device == "b300"]
    assert (alone.low, alone.high) == (min(few), max(few))
    many = interval_of(JobKind(False, "bf16"), "a100")
    assert min(everything) < many.low and many.high < max(everything)


def test_the_ratios_are_those_of_the_committed_benchmark() -> None:
    with RESULTS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["stack"] != "fsdp"]
    assert [run.ratio for run in published_runs()] == [
        round(1 + float(row["error"]), 4) for row in rows
    ]
    assert [(run.model, run.device, run.kind.precision) for run in published_runs()] == [
        (row["model"], row["device"], row["precision"]) for row in rows
    ]


def test_runs_of_the_same_kind_count_most() -> None:
    """fp8 on H100 is predicted nearly right, experts on B200 are not."""
    right = interval_of(JobKind(experts=False, precision="fp8"), "h100")
    wrong = interval_of(JobKind(experts=True, precision="bf16"), "b200")
    assert right.alike == 4 and right.high / right.low < wrong.high / wrong.low
    unknown = interval_of(JobKind(experts=False, precision="bf16"), "mine")
    assert unknown.alike == 0 and unknown.runs == len(published_runs())


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"fp8": None, "num_experts": None}, JobKind(False, "bf16")),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise", "num_experts": 8}, JobKind(True, "fp8")),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "num_experts": None}, JobKind(False, "mxfp8")),
        ({"fp8": None, "fp4": "e2m1", "num_experts": None}, JobKind(False, "nvfp4")),
    ],
)
def test_the_kind_of_a_job(values: dict[str, object], kind: JobKind) -> None:
    assert job_kind(Namespace(bf16=True, **values)) == kind


def test_percentiles_and_text() -> None:
    weighted = [(3.0, 1.0), (1.0, 1.0), (2.0, 2.0)]
    assert [percentile(weighted, part) for part in (0, 0.25, 0.26, 0.75, 1)] == [1, 1, 2, 2, 3]
    found = interval_of(JobKind(False, "bf16"), "h100")
    low, to, high = found.text(0.1).split()
    assert to == "to" and float(low) == pytest.approx(0.1 * found.low, rel=0.05)
    assert float(high) == pytest.approx(0.1 * found.high, rel=0.05)
    assert found.text(0.0) == "0 to 0"
    assert found.text(0.1, 0.0) == found.text(0.1)
    assert found.seconds(2.0, 3.0) == (2.0 * found.low, 3.0 * found.high)
