"""``mindspeed profile --modelled``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.support import commands_job
from tests.support.lazy import needs
from tests.support.trainer_job import TINY

needs("megatron.core", "matplotlib")

JOB = [*TINY, "--num-layers", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"]


@pytest.fixture
def profile(ranks, tmp_path):
    def run(*words, flags=JOB):
        command = ["profile", *words, *flags]
        (answer,) = ranks(
            1, commands_job.run, command, str(tmp_path), setup=commands_job.SETUP, backend=None,
            env={"COLUMNS": "50"}, timeout=120,
        )  # fmt: skip
        return answer

    return run


def test_figures_picture_and_trace_of_a_step(profile, tmp_path):
    rates = "--tflops 100 --link-bandwidth 50 --link-latency 5 --node-size 1 --network-bandwidth 2"
    words = ["--modelled", *rates.split(), "--plot", "step.svg", "--trace", "step.json"]
    status, text, errors = profile(*words)
    assert status == 0, errors
    plain = " ".join(text.split())
    assert "modelled, not measured: one step of 1 micro-batch on a rank of stage 0" in plain
    assert "2 ranks = tensor 2 x pipeline 1 x context 1 x data 1" in plain
    assert "F = 100 TFLOP/s; in a node of 1 beta = 1 / 50 GB/s, alpha = 5 us;" in plain
    assert "between nodes beta = 1 / 2 GB/s, alpha = 20 us" in plain
    assert "no pipeline bubble" in plain
    rows = [line.split() for line in text.splitlines()]
    header = next(row for row in rows if row[:2] == ["layer", "phase"])
    assert header == ["layer", "phase", "AG", "AR", "RS", "calls", "GFLOP", "compute", "exposed"]
    (forward,) = [row for row in rows if row[:3] == ["layers", "1-2", "forward"]]
    sent = 2 * 16384 / 2**20  # two gathers and two scatters of [64, 2, 64] in fp32, halved
    assert forward[3:5] == [f"{sent:.3f}"] * 2
    assert forward[5] == "4"
    # On the network: 4 calls of 20 us and 16 KiB at 2 GB/s.
    assert float(forward[-1]) == pytest.approx(4 * (20e-6 + 16384 / 2e9) * 1e3, abs=1e-3)
    assert (tmp_path / "step.svg").read_text().startswith("<?xml")
    trace = json.loads((tmp_path / "step.json").read_text())
    assert {"operators", "waiting", "tensor model parallel"} <= {
        event["args"].get("name") for event in trace["traceEvents"]
    }
    assert text.endswith("wrote step.svg\nwrote step.json\n")


WRONG = {
    "not-modelled": ([], JOB, "give --modelled"),
    "rate": (["--modelled", "--tflops", "0"], JOB, "--tflops 0.0 must be greater than 0"),
    "bandwidth": (["--modelled", "--link-bandwidth", "nan"], JOB, "--link-bandwidth"),
    "latency": (["--modelled", "--link-latency", "-1"], JOB, "--link-latency"),
    "stage": (["--modelled", "--stage", "1"], JOB, "--stage 1: there are stages 0 to 0"),
    "picture": (["--modelled", "--plot", "step.gif"], JOB, "--plot step.gif: the file must end in"),
    "trace": (["--modelled", "--trace", "t"], JOB, "--trace t: the file must end in .json"),
    "flag": (["--modelled", "--link-bandwith", "3"], JOB, "--link-bandwith"),
    "experts": (["--modelled", "--num-experts", "4"], JOB, "routed experts depend on values"),
    "no-model": (["--modelled"], [], "--num-layers is missing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_message(profile, case):
    words, flags, message = WRONG[case]
    status, _, errors = profile(*words, flags=flags)
    assert status in (1, 2)
    assert message in errors
    assert "Traceback" not in errors
