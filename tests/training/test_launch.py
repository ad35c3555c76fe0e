"""Local ranks: environment, signals, and one rank that fails ends all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RANK = """
import os, signal, sys, time
import torch.distributed as dist
import torch
from mindspeed.errors import TrainingError
from mindspeed.training.guard import stop_together

def body(rank):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    {body}
    for _ in range(200):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.1)

with stop_together("pretrain"):
    body(int(os.environ["RANK"]))
"""
LAUNCH = """
import sys
from mindspeed.training.launch import run_ranks
sys.exit(run_ranks([sys.executable, sys.argv[1]], int(sys.argv[2])))
"""


# A body that ends with os._exit(0) leaves nothing to tear down: gloo may abort a process that ends
# without having left its job (mindspeed.training.setup.leave_job).


def launch(tmp_path: Path, body: str, ranks: int = 4) -> subprocess.Popen[str]:
    script = tmp_path / "rank.py"
    script.write_text(RANK.replace("{body}", body))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(script), str(ranks)],
        env=environment | {"MINDSPEED_DEVICE": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_rank_that_raises_ends_all_and_its_error_is_the_only_one(tmp_path):
    job = launch(tmp_path, 'if rank == 2: raise TrainingError("iteration 7: the loss is nan")')
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 1
    assert output.count("mindspeed pretrain [rank") == 1
    assert "mindspeed pretrain [rank 2]: iteration 7: the loss is nan" in output
    assert "Traceback" not in output


def test_a_rank_that_is_killed_ends_all_and_the_others_say_what_they_saw(tmp_path):
    job = launch(tmp_path, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", ranks=3)
    output, _ = job.communicate(timeout=120)
    assert job.returncode != 0
    assert "lost contact with another rank" in output
    assert output.count("mindspeed pretrain [rank") == 1


def test_sigterm_to_the_launcher_reaches_every_rank(tmp_path):
    body = (
        "signal.signal(signal.SIGTERM, lambda *a: os._exit(0)); "
        f"open({str(tmp_path)!r} + f'/ready{{rank}}', 'w').close(); time.sleep(60)"
    )
    job = launch(tmp_path, body, ranks=2)
    deadline = time.monotonic() + 90
    while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_know_each_other_and_the_store_listens_on_loopback_only(tmp_path, ranks):
    body = (
        "line = f'{rank} {dist.get_world_size()} {os.environ[\"MASTER_ADDR\"]}\\n'; "
        "os.write(1, line.encode()); os._exit(0)"
    )
    job = launch(tmp_path, body, ranks)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    assert sorted(output.split("\n")[:-1]) == [f"{r} {ranks} 127.0.0.1" for r in range(ranks)]


@pytest.mark.parametrize("given", [None, "1"], ids=["default", "given"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_share_the_cores_unless_the_user_says_otherwise(given, ranks, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    body = (
        "line = f'{os.environ[\"OMP_NUM_THREADS\"]} {torch.get_num_threads()}\\n'; "
        "os.write(1, line.encode()); os._exit(0)"
    )
    job = launch(tmp_path, body, ranks)
    output, _ = job.communicate(timeout=240)
    share = given or str(max(1, len(os.sched_getaffinity(0)) // ranks))
    assert sorted(output.split("\n")[:-1]) == [f"{share} {share}"] * ranks


def test_a_single_process_leaves_the_number_of_threads_alone(tmp_path):
    """torch then uses the whole machine."""
    code = (
        "import os, torch; before = torch.get_num_threads();"
        "from mindspeed.training import setup; setup.join_job();"
        "print(os.environ.get('OMP_NUM_THREADS'), torch.get_num_threads() == before)"
    )
    unset = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    done = subprocess.run(
        [sys.executable, "-c", "import mindspeed.megatron_adaptor\n" + code],
        env={k: v for k, v in os.environ.items() if k not in unset} | {"MINDSPEED_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout == "None True\n", done.stderr[-2000:]
