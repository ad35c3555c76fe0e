"""``mindspeed explain --timeline``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.support import commands_job
from tests.support.lazy import needs
from tests.support.trainer_job import TINY

needs("megatron.core", "matplotlib")

JOB = [*TINY, "--num-layers", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"]


CLUSTER = {
    "name": "slow",
    "device": {
        "name": "d", "peak_tflops": {"fp32": 100.0}, "memory_gib": 8.0, "memory_gbs": 1000.0,
    },
    "levels": [{"name": "network", "size": None, "gbs": 2.0, "latency_us": 20.0}],
}  # fmt: skip


@pytest.fixture
def run(ranks, tmp_path):
    def call(*words, command=("explain", "--timeline"), flags=JOB):
        (tmp_path / "slow.json").write_text(json.dumps(CLUSTER))
        (answer,) = ranks(
            1, commands_job.run, [*command, *words, *flags], str(tmp_path),
            setup=commands_job.SETUP, backend=None, env={"COLUMNS": "50"}, timeout=120,
        )  # fmt: skip
        return answer

    return call


@pytest.mark.slow
def test_figures_picture_and_trace_of_a_step(run, tmp_path):
    words = ["--cluster", "slow.json", "--plot", "step.svg", "--trace", "step.json"]
    status, text, errors = run(*words)
    assert status == 0, errors
    plain = " ".join(text.split())
    assert "modelled, not measured: one step of 1 micro-batch on a rank of stage 0" in plain
    assert "2 ranks: tensor 2, data 1" in plain
    assert "slow: 100 fp32 TFLOP/s, memory 1000 GB/s, launch 4 us; network 2 GB/s" in plain
    assert "no pipeline bubble" in plain
    rows = [line.split() for line in text.splitlines()]
    header = next(row for row in rows if row[:2] == ["layer", "phase"])
    assert header == ["layer", "phase", "AG", "AR", "RS", "calls", "GFLOP", "compute", "exposed"]
    (forward,) = [row for row in rows if row[:5] == ["chunk", "0,", "layers", "1-2", "forward"]]
    sent = 2 * 16384 / 2**20  # two gathers and two scatters of [64, 2, 64] in fp32, halved
    assert forward[5:7] == [f"{sent:.3f}"] * 2
    assert forward[7] == "4"
    # Four calls of 20 us and 16 KiB at 2 GB/s.
    assert float(forward[-1]) == pytest.approx(4 * (20e-6 + 16384 / 2e9) * 1e3, abs=1e-3)
    assert (tmp_path / "step.svg").read_text().startswith("<?xml")
    trace = json.loads((tmp_path / "step.json").read_text())
    assert {"operators", "waiting", "tensor model parallel"} <= {
        event["args"].get("name") for event in trace["traceEvents"]
    }
    assert text.endswith("wrote step.svg\nwrote step.json\n")


@pytest.mark.slow
def test_the_earlier_name_runs_the_same_and_says_so(run):
    status, text, errors = run("--modelled", command=("profile",))
    assert status == 0, errors
    assert "mindspeed profile --modelled is now mindspeed explain --timeline" in errors
    same, again, _ = run("--cluster", "generic")
    assert (same, again) == (status, text)


OLD, TIMELINE = ("profile",), ("explain", "--timeline", "--cluster", "generic")
WRONG = {
    "not modelled": (OLD, [], "give --modelled"),
    "rate": (OLD, ["--modelled", "--tflops=3"], "--tflops: rates are those of --cluster"),
    "no cluster": (("explain", "--timeline"), [], "--cluster is missing"),
    "no timeline": (("explain", "--cluster", "generic"), ["--stage", "0"], "--stage belongs to"),
    "json": (TIMELINE, ["--json"], "--json has no effect with --timeline"),
    "stage": (TIMELINE, ["--stage", "1"], "--stage 1: there are stages 0 to 0"),
    "picture": (TIMELINE, ["--plot", "step.gif"], "--plot step.gif: the file must end in"),
    "trace": (TIMELINE, ["--trace", "t"], "--trace t: the file must end in .json"),
    "flag": (TIMELINE, ["--micro-batchs", "3"], "--micro-batchs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_message(run, case):
    command, words, message = WRONG[case]
    status, _, errors = run(*words, command=command)
    assert status in (1, 2)
    assert message in errors
    assert "Traceback" not in errors
