"""benchmarks/ops.py runs from end to end and writes its files."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ops.py"


def run(*arguments):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_quick_run_on_the_cpu(tmp_path):
    done = run("--out", tmp_path / "figures")
    assert done.returncode == 0, done.stderr
    assert "slower than torch eager of the same formula: " in done.stdout
    with open(tmp_path / "figures.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    document = json.loads((tmp_path / "figures.json").read_text())
    assert len(document["rows"]) == len(rows)
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    timed = {(row["operator"], row["dtype"]) for row in rows if row["contender"] == "mindspeed"}
    assert {("rms_norm", "fp32"), ("rms_norm_backward", "bf16")} <= timed
    for row in document["rows"]:
        assert row["milliseconds"] > 0 and row["fraction_of_clone"] > 0
        if row["contender"] == "eager":
            assert row["speed_over_eager"] == 1


def test_figures_follow_from_bytes_flops_and_times(tmp_path):
    done = run("--operator", "rms_norm", "matmul_add", "--dtype", "bf16", "--hidden", 32, 48,
               "--out", tmp_path / "figures")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [(r["operator"], r["hidden"], r["contender"]) for r in rows] == [
        (operator, hidden, contender)
        for operator in ("matmul_add", "rms_norm")
        for hidden in (32, 48)
        for contender in ("mindspeed", "eager")
    ]
    for row in rows:
        hidden, seconds = row["hidden"], row["milliseconds"] / 1e3
        if row["operator"] == "rms_norm":
            # x, gamma, y in bf16; one fp32 number a row
            moved = 2 * (2 * 4096 * hidden + hidden) + 4 * 4096
            assert row["teraflops"] is None
        else:
            # two bf16 matrices; the fp32 gradient is read and written
            moved = 2 * 2 * 4096 * hidden + 2 * 4 * hidden * hidden
            flops = 2 * 4096 * hidden * hidden
            assert row["teraflops"] == pytest.approx(flops / seconds / 1e12)
        assert row["gigabytes_per_second"] == pytest.approx(moved / seconds / 1e9)


def test_an_operator_without_workload_is_refused():
    done = run("--operator", "mm_all_reduce")
    assert done.returncode == 2
    assert "--operator: no workload for mm_all_reduce; there are " in done.stderr
