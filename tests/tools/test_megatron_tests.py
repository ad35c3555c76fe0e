"""The runner of Megatron-LM's tests gives every test its own outcome, independent of the others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "megatron_tests.py"

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--experimental", action="store_true")
"""

FATES = """
import os, time, pytest, torch, torch.distributed as dist
from tests.unit_tests.helper import world

RANK = int(os.environ["RANK"])

def test_a_passes_with_a_collective():
    assert world() == int(os.environ["WORLD_SIZE"])

def test_b_fails_on_one_rank_while_the_others_wait():
    world()
    if RANK == 0:
        raise KeyError("rank 0 only")
    dist.barrier()

def test_c_passes_again():
    world()

def test_d_hangs():
    time.sleep(1000)

def test_e_crashes():
    os._exit(3)

def test_f_fails_everywhere():
    world()
    assert 1 == 2

def test_g_follows_a_failure():
    world()

@pytest.mark.skip(reason="just so")
def test_h_is_skipped():
    pass

def test_i_needs_more_ranks():
    raise RuntimeError("world_size (1) is not divisible by 4")

def test_j_writes_where_it_runs():
    open("litter", "w").close()

@pytest.mark.experimental
def test_k_is_experimental(request):
    assert request.config.getoption("--experimental")
"""

HELPER = """
import os, torch, torch.distributed as dist

def world():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones)
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    root = tmp_path / "checkout"
    files = {
        "megatron/core/__init__.py": "",
        "tests/__init__.py": "",
        "tests/unit_tests/__init__.py": "",
        "tests/unit_tests/conftest.py": CONFTEST,
        "tests/unit_tests/helper.py": HELPER,
        "tests/unit_tests/test_fates.py": FATES,
        "tests/unit_tests/broken/test_import.py": "import no_such_module",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def run(checkout: Path, results: Path, *options: str) -> str:
    command = [sys.executable, str(TOOL), "--megatron", str(checkout), "--adaptor", ""]
    limits = ["--timeout", "5", "--patience", "2", "--json", str(results)]
    done = subprocess.run(
        [*command, *limits, *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def outcomes(results: Path) -> dict[str, str]:
    lines = results.read_text().splitlines()
    entries = [json.loads(line) for line in lines if line != '{"cut off']
    return {
        entry["nodeid"].split("::")[-1].split("_")[1]: entry["outcome"]
        for entry in entries
        if "nodeid" in entry and "fates" in entry["file"]
    }


EXPECTED = {
    "a": "passed",
    "b": "failed",
    "c": "passed",
    "d": "hang",
    "e": "crash",
    "f": "failed",
    "g": "passed",
    "h": "skipped",
    "i": "failed",
    "j": "passed",
    "k": "passed",
}


@pytest.mark.slow
def test_every_test_gets_its_own_outcome_on_two_ranks(checkout, tmp_path):
    before = sorted(checkout.rglob("*"))
    results = tmp_path / "results.jsonl"
    text = run(checkout, results, "--world-size", "2")
    assert outcomes(results) == EXPECTED
    assert sorted(checkout.rglob("*")) == before, "the checkout was written to"
    lines = results.read_text().replace('\\"', '"')
    assert "KeyError: 'rank 0 only'" in lines and "other ranks were still waiting" in lines
    assert "hangs in test_d_hangs (unit_tests/test_fates.py)" in lines
    assert "exited with code 3" in lines
    assert "No module named 'no_such_module'" in lines
    assert "| total     | 5      | 3      | 2             | 1       | 1 " in text


@pytest.mark.slow
def test_an_interrupted_run_resumes_where_it_stopped(checkout, tmp_path):
    results = tmp_path / "results.jsonl"
    done = {"world_size": 1, "file": "tests/unit_tests/test_fates.py"}
    with open(results, "w") as file:
        for test in ("d_hangs", "e_crashes"):
            nodeid = f"tests/unit_tests/test_fates.py::test_{test}"
            file.write(json.dumps({**done, "nodeid": nodeid, "outcome": "passed"}) + "\n")
        file.write('{"cut off')
    run(checkout, results, "--resume", "--select", "test_fates.py")
    assert outcomes(results) == {**EXPECTED, "b": "failed", "d": "passed", "e": "passed"}


KILLER = """
import os, signal, time

def test_kills_the_nursery_and_leaves_a_process_behind():
    nursery = os.getppid()
    if os.fork() == 0:
        os.setpgid(0, 0)
        time.sleep(250)
        os._exit(0)
    os.kill(nursery, signal.SIGKILL)
    time.sleep(250)
"""


@pytest.mark.slow
def test_a_process_left_behind_does_not_keep_the_driver_waiting(checkout, tmp_path):
    (checkout / "tests/unit_tests/test_killer.py").write_text(KILLER)
    results, began = tmp_path / "results.jsonl", time.monotonic()
    run(checkout, results, "--select", "test_killer.py")
    assert "the process that forks the ranks died 3 times" in results.read_text()
    assert time.monotonic() - began < 240  # not the end of the process that was left behind


def test_a_test_that_needs_a_download_is_reported_with_its_reason_and_not_counted(tmp_path):
    results = tmp_path / "results.jsonl"
    entry = {"world_size": 8, "file": "tests/unit_tests/test_muon.py"}
    outcomes = [
        {"outcome": "passed"},
        {"outcome": "failed", "error": "AssertionError: Emerging Optimizers is not installed."},
    ]
    results.write_text(
        "".join(json.dumps({**entry, "nodeid": str(i), **o}) + "\n" for i, o in enumerate(outcomes))
    )
    report = subprocess.run(
        [sys.executable, str(TOOL), "--json", str(results), "--report"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    total = next(line for line in report.splitlines() if line.startswith("| total"))
    assert total.split("|")[-3:-1] == [" 1                ", " 100.0 %       "]
    assert "which is not on PyPI" in report
