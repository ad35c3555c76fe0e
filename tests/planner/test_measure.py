"""Measured candidates correct the model, and end the measurements when they can."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed.errors import PlanError
from mindspeed.planner.correction import Factors, Parts, extent
from mindspeed.planner.measure import OF_A_MEASUREMENT, WARM_UP, Launcher, _seconds, measure


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    pp: int = 1
    devices: int = 16


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    prediction: SimpleNamespace = field(compare=False)


def candidate(compute, tensor, data, **layout):
    exposed = {"TENSOR_MODEL_PARALLEL_GROUP": tensor, "data parallel": data}
    prediction = SimpleNamespace(seconds=compute + tensor + data, exposed=exposed)
    return Candidate(Layout(**layout), prediction)


def test_extents_in_the_order_of_ranks():
    layout = Layout(tp=2, cp=2, ep=2, pp=2, devices=32)
    names = {
        "TENSOR_MODEL_PARALLEL_GROUP": 2,
        "CONTEXT_PARALLEL_GROUP": 4,
        "EXPERT_MODEL_PARALLEL_GROUP": 4,
        "data parallel": 16,
        "DATA_PARALLEL_GROUP_WITH_CP": 16,
        "messages": 32,
        "unknown": 32,
    }
    assert {name: extent(name, layout) for name in names} == names
    assert extent("EXPERT_MODEL_PARALLEL_GROUP", replace(layout, etp=1)) == 2


def test_parts_add_up():
    parts = Parts.of(candidate(1.0, 0.25, 0.5, tp=8).prediction, Layout(tp=8), 8)
    assert (parts.compute, parts.intra, parts.inter) == (1.0, 0.25, 0.5)
    assert parts.seconds == 1.75


def test_updates_are_those_of_all_measurements_at_once():
    """The posterior of Bayesian linear regression, solved as one system."""
    rows = [Parts(1.0, 0.2, 0.1), Parts(0.8, 0.5, 0.0), Parts(0.9, 0.0, 0.6)]
    measured = [2.0, 2.4, 3.0]
    factors = Factors.first(rows[0], measured[0])
    for row, seconds in zip(rows[1:], measured[1:], strict=True):
        factors = factors.updated(row, seconds)
    scale = 2.0 / 1.3
    design = np.array([row.vector() for row in rows])
    weights = np.diag(1 / (0.05 * np.array(measured)) ** 2)
    precision = np.eye(3) / (0.3 * scale) ** 2 + design.T @ weights @ design
    right = np.full(3, scale) / (0.3 * scale) ** 2 + design.T @ weights @ np.array(measured)
    assert factors.mean == pytest.approx(np.linalg.solve(precision, right), rel=1e-9)
    assert np.array(factors.covariance) == pytest.approx(np.linalg.inv(precision), rel=1e-6)


def machine(compute, intra, inter):
    """Steps of a machine whose devices and links are this much slower than the model's."""
    started = []

    def run(number, one):
        started.append(number)
        parts = Parts.of(one.prediction, one.layout, 8)
        return compute * parts.compute + intra * parts.intra + inter * parts.inter

    return run, started


CANDIDATES = [
    candidate(1.00, 0.02, 0.30, tp=2),
    candidate(1.05, 0.25, 0.05, tp=8),
    candidate(1.04, 0.03, 0.29, tp=2),
    candidate(1.30, 0.20, 0.10, tp=4),
    candidate(9.00, 0.20, 0.10, tp=4),
]


def test_the_order_is_corrected_and_the_hopeless_are_not_started():
    """Links between nodes are four times slower than the model's: the second one is the best."""
    run, started = machine(2.0, 2.0, 8.0)
    told = []
    found = measure(CANDIDATES, run, node_size=8, tell=told.append)
    assert started[0] == 1 and 2 in started and 5 not in started
    assert found.best.number == 2
    assert found.best.seconds == pytest.approx(2 * 1.05 + 2 * 0.25 + 8 * 0.05)
    assert found.factors.mean[2] > 1.5 * found.factors.mean[0]
    assert {n for n, _ in found.left} == set(range(1, 6)) - set(started)
    assert [s for _, s in found.left] == sorted(s for _, s in found.left)
    assert tuple(told) == found.runs
    assert "not started" in found.table() and found.to_json()["runs"][0]["number"] == 1


def test_the_best_of_all_is_found_where_the_model_is_right_but_for_its_factors():
    for factors in ((1.0, 1.0, 1.0), (3.0, 4.0, 2.0), (0.5, 0.4, 0.7)):
        run, started = machine(*factors)
        everything = measure(CANDIDATES, run, node_size=8, all_of_them=True)
        assert len(started) == len(CANDIDATES) and everything.left == ()
        assert measure(CANDIDATES, run, node_size=8).best.number == everything.best.number


def test_ctrl_c_keeps_what_was_measured():
    def run(number, one):
        if number != 1:
            raise KeyboardInterrupt
        return 9.0

    found = measure(CANDIDATES[:3], run, node_size=8)
    assert found.interrupted and found.to_json()["interrupted"]
    assert [one.number for one in found.runs] == [1] and {n for n, _ in found.left} == {2, 3}
    assert found.best.number == 1 and "not started, interrupted: " in found.table()


def test_a_candidate_that_fails_is_reported():
    def run(number, one):
        if number == 1:
            raise PlanError("out of memory")
        return 1.0

    found = measure(CANDIDATES[:2], run, node_size=8)
    assert found.best.number == 2 and "out of memory" in found.table()
    with pytest.raises(PlanError, match="none of the candidates ran\n1: out of memory"):
        assert measure(CANDIDATES[:1], run, node_size=8).best


PROGRAM = """
import os, sys
steps = int(sys.argv[sys.argv.index("--train-iters") + 1])
if "--fail" in sys.argv:
    sys.exit("no memory")
for step in range(steps):
    if os.environ["RANK"] == "0":
        time = 900 if step < 3 else 10 + step
        print(f" iteration {step} | elapsed time per iteration (ms): {time:.1f} |", flush=True)
"""


@pytest.mark.slow
def test_a_launcher_reads_the_log(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = Launcher((str(program),), 2, tmp_path / "work", {"OMP_NUM_THREADS": "1"})
    steps = OF_A_MEASUREMENT["train_iters"]
    expected = np.median([10 + step for step in range(WARM_UP, steps)]) / 1000
    assert launcher.seconds("one", ["--train-iters", str(steps)]) == pytest.approx(expected)
    assert "elapsed time" in (tmp_path / "work" / "one.log").read_text()
    assert (tmp_path / "work").stat().st_mode & 0o027 == 0
    with pytest.raises(PlanError, match="ended with status 1"):
        launcher.seconds("two", ["--train-iters", "8", "--fail"])
    with pytest.raises(PlanError, match="it logged 3 steps"):
        _seconds(_log(tmp_path, 3), 0)


def _log(directory, steps):
    path = directory / "short.log"
    path.write_text("elapsed time per iteration (ms): 10.0 |\n" * steps)
    return path


WAITS = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1]) / os.environ["RANK"]
here.with_suffix(".new").write_text(str(os.getpid()))
here.with_suffix(".new").rename(here)
time.sleep(600)
"""


@pytest.mark.slow
def test_no_rank_outlives_an_interrupted_launch(tmp_path):
    """Ranks of torchrun are in sessions of their own, so killing its group is not enough."""
    program = tmp_path / "program.py"
    program.write_text(WAITS)
    launcher = Launcher((str(program), str(tmp_path)), 2, tmp_path / "work", {})
    pids = [tmp_path / str(rank) for rank in range(2)]

    def interrupt():
        while not all(path.exists() for path in pids):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist ignores it
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launcher.seconds("one", [], timeout=120)
        assert not any(os.path.exists(f"/proc/{path.read_text()}") for path in pids)
    finally:
        signal.signal(signal.SIGINT, before)
        for path in filter(Path.exists, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.slow
def test_candidates_of_a_tiny_job_are_measured_on_two_ranks(tmp_path):
    """The second cannot be started: 4 samples are no multiple of 3 x 2; the third need not be."""
    words = f"mixed {tmp_path} --num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    words += "--seq-length 32 --max-position-embeddings 32 --vocab-size 64 --lr 1e-3 "
    words += "--tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 4"
    done = subprocess.run(
        [sys.executable, "-m", "tests.planner.measure_job", *words.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "measured.json").read_text())
    runs = {run["number"]: run for run in found["runs"]}
    assert runs[1]["seconds"] > 0
    assert 2 not in runs or "ended with status" in runs[2]["error"]
    assert 3 in [one["number"] for one in found["not_started"]]
    assert "measured best: candidate" in done.stdout
    assert (tmp_path / "measured" / "candidate-1.log").exists()
