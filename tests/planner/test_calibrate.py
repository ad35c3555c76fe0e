"""Calibration: robust times, a fit that finds known links, and a file that planning reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed.planner.cluster import load_cluster, parse_cluster
from mindspeed.planner.cluster.collectives import Level, seconds
from mindspeed.planner.cluster.measured_device import Stopwatch, of_samples
from mindspeed.planner.cluster.measured_links import (
    FITTED,
    Fit,
    Sample,
    all_reduce_error,
    fit,
    groups_of,
)
from mindspeed.planner.cluster.rates import DeviceRates
from tests.planner import calibrate_job
from tests.support.lazy import needs

needs("megatron.core")

SETUP = "tests.support.warm"
NODE, NETWORK = Level("node", 4, 40, 3.0), Level("network", None, 5, 9.0)
START = 7e-6


class FakeTime:
    """A clock that work moves forward."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0

    def work(self) -> None:
        self.calls += 1
        self.now += 1.0 if self.calls % 50 == 0 else 0.002  # a rare interruption


def test_interruptions_do_not_change_a_median() -> None:
    time = FakeTime()
    watch = Stopwatch(lambda: None, samples=9, seconds=0.02, now=lambda: time.now)
    found = watch.time(time.work)
    assert found.seconds == pytest.approx(0.002)
    assert time.calls == 2 + 1 + 9 * 10  # warm-up, an estimate, samples of 0.02 seconds


def test_the_spread_is_that_of_the_quartiles() -> None:
    found = of_samples([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.seconds, found.spread) == (3.0, pytest.approx(2 / 3))
    assert of_samples([5.0]).spread == 0.0


def samples_of(noise: float = 0.0) -> list[Sample]:
    """Times of groups of 4 and of 3 ranks by the formulas of the planner."""
    found = []
    for level, link, size in ((0, NODE, 4), (1, NETWORK, 3)):
        flat = Level(link.name, None, link.gbs, link.latency_us)
        for step in range(5):
            for op in (*FITTED, "all_reduce"):
                payload = 12 * 8 ** (step + 2)
                exact = START + seconds(op, payload, range(size), (flat,))
                found.append(Sample(level, op, size, payload, exact * (1 + noise * (step % 3 - 1))))
    return found


def test_the_fit_finds_the_links_that_made_its_samples() -> None:
    found = fit(samples_of())
    assert found.start == pytest.approx(START, rel=1e-6)
    for level, link in enumerate((NODE, NETWORK)):
        latency, rate = found.levels[level]
        assert latency == pytest.approx(link.latency, rel=1e-6)
        assert rate == pytest.approx(link.bytes_per_second, rel=1e-6)
    assert found.error < 1e-6
    assert all_reduce_error(samples_of(), found) < 1e-6


def test_noise_of_some_percent_moves_the_fit_by_as_much() -> None:
    found = fit(samples_of(noise=0.03))
    for level, link in enumerate((NODE, NETWORK)):
        assert found.levels[level][1] == pytest.approx(link.bytes_per_second, rel=0.06)
    assert 0 < found.error < 0.05


def test_a_fit_is_never_negative() -> None:
    shrinking = [Sample(0, "send", 2, 1 << step, 1e-3 / (step + 1)) for step in range(10, 15)]
    found: Fit = fit(shrinking)
    latency, rate = found.levels[0]
    assert found.start == 0 and latency >= 0 and rate > 0


def test_levels_are_nodes_and_equal_ranks_of_nodes() -> None:
    assert groups_of(6, 3) == [[[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]]


@pytest.mark.parametrize("launch", [None, 1.0])
def test_ranks_measure_both_levels_and_agree(ranks: Any, launch: float | None) -> None:
    """A host that is busy while launches are measured makes no product slower than it is."""
    found = ranks(4, calibrate_job.calibrated, 2, launch, setup=SETUP, timeout=120)
    assert all(other == found[0] for other in found)
    cluster = found[0]
    assert [level.size for level in cluster.levels] == [2, None]
    assert all(level.source.startswith("measured: 25 collectives") for level in cluster.levels)
    assert cluster.overlap_slowdown >= 1
    assert "bf16" not in cluster.device.peak_tflops  # it was not measured
    assert parse_cluster(cluster.to_json(), "here") == cluster

    (one,) = [p for p in cluster.device.products if (p.m, p.n, p.k) == (32, 64, 64)]
    again = DeviceRates(cluster).product_seconds(32, 64, 64, "fp32")
    assert again == pytest.approx(one.seconds)


def test_ranks_must_fill_nodes(ranks: Any) -> None:
    assert (
        ranks(2, calibrate_job.refused, 3, setup=SETUP)
        == ["--node-size 3 does not divide the 2 ranks of this job"] * 2
    )


def test_the_command_writes_a_file_that_planning_reads(ranks: Any, tmp_path: Path) -> None:
    from tests.support import commands_job

    out = tmp_path / "mine.json"
    words = ["calibrate", "--out", out, "--base", "h100", "--dtypes", "fp32", "--largest", 64]
    words += ["--samples", 3, "--sample-seconds", 1e-4]
    ranks(1, commands_job.run, [str(word) for word in words], setup=SETUP, backend=None)
    cluster = load_cluster(out)
    assert cluster.name == "mine"
    assert cluster.device.peak_tflops == load_cluster("h100").device.peak_tflops
    assert cluster.device.gemm_efficiency < 0.5  # this is no H100
    assert cluster.levels == load_cluster("h100").levels
    assert "one rank alone" in cluster.note
    assert json.loads(out.read_text())["device"]["source"]["products"].startswith("measured")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "x.txt"], "--out x.txt: the file must end in .json"),
        (["--out", "x.json", "--dtypes", "fp4"], "--dtypes fp4: allowed are bf16, fp16, fp32"),
        (["--out", "x.json", "--base", "h10"], "--cluster h10: no preset of that name"),
        (["--out", "x.json", "--largest", "1"], "--largest 1 must be from 8"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from mindspeed.cli.main import main

    assert main(["calibrate", *words]) == 1
    assert message in capsys.readouterr().err
