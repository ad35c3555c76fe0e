"""Local ranks: environment, signals, and a failing rank ends all."""

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
from mindspeed.training.fail_together import stop_together

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


def launch(tmp_path: Path, body: str, ranks: int = 4, program: str = RANK) -> subprocess.Popen[str]:
    script = tmp_path / "rank.py"
    script.write_text(program.replace("{body}", body))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(script), str(ranks)],
        env=environment | {"MINDSPEED_DEVICE": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_rank_that_raises_ends_all_ranks_and_only_its_error_is_shown(tmp_path):
    job = launch(
        tmp_path, 'if rank == 2: raise TrainingError("iteration 7: the loss is nan")', ranks=3
    )
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 1
    assert output.count("mindspeed pretrain [rank") == 1
    assert "mindspeed pretrain [rank 2]: iteration 7: the loss is nan" in output
    assert "Traceback" not in output


def test_a_killed_rank_ends_all_ranks_and_the_others_report(tmp_path):
    job = launch(tmp_path, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", ranks=3)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 128 + signal.SIGKILL
    assert output.count("mindspeed: rank 1 was ended by SIGKILL") == 1
    assert output.count("mindspeed pretrain [rank") <= 1  # one of the others may have been quicker
    assert "Traceback" not in output


EARLY = """
import os, signal, sys, time
import torch.distributed as dist
from mindspeed.training.fail_together import stop_together

with stop_together("pretrain"):
    rank = int(os.environ["RANK"])
    {body}
    dist.init_process_group("gloo")
    dist.barrier()
    os._exit(0)
"""


@pytest.mark.parametrize(
    "body, said",
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None",
            "rank 1 was ended by SIGKILL",
        ),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSEGV) if rank == 0 else None",
            "rank 0 was ended by SIGSEGV",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "assert rank != 1, 'no room'",
            "[rank 1]: unexpected AssertionError: no room",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_cause_is_shown_when_a_rank_dies_before_rendezvous(tmp_path, body, said):
    job = launch(tmp_path, body, 2, EARLY)
    started = time.monotonic()
    output, _ = job.communicate(timeout=120)
    assert job.returncode != 0
    assert said in output
    assert "lost contact" not in output and "Traceback" not in output
    assert time.monotonic() - started < 100, "the others did not wait for it"


def wait_for(found, seconds: float = 90.0):
    """What ``found()`` returns as soon as that is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := found():
            return result
        time.sleep(0.1)
    raise AssertionError("nothing was found")


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


NOTE_PID = "open({folder!r} + f'/pid{{rank}}', 'w').write(str(os.getpid()))"


def noted(folder: Path, ranks: int) -> list[int]:
    """The process ids that :data:`NOTE_PID` wrote, when all are there."""
    texts = [path.read_text() for path in sorted(folder.glob("pid*"))]
    return [int(text) for text in texts] if len(texts) == ranks and all(texts) else []


def test_ranks_end_when_their_launcher_is_killed(tmp_path):
    """Those that are blocked, too: they wait for a lock that never comes."""
    note = NOTE_PID.format(folder=str(tmp_path))
    job = launch(tmp_path, f"{note}; import threading; threading.Event().wait()", 2, EARLY)
    pids = wait_for(lambda: noted(tmp_path, 2))
    assert all(map(is_alive, pids))
    job.kill()
    wait_for(lambda: not any(map(is_alive, pids)), 10)


@pytest.mark.slow
def test_ranks_end_when_torchrun_is_killed(tmp_path):
    note = NOTE_PID.format(folder=str(tmp_path))
    job = torchrun(tmp_path, f"{note}; import threading; threading.Event().wait()")
    pids = wait_for(lambda: noted(tmp_path, 2))
    job.kill()
    wait_for(lambda: not any(map(is_alive, pids)), 10)


@pytest.mark.slow
def test_a_stopped_rank_is_reported_as_unresponsive(tmp_path):
    """By the launcher at once, by the other ranks when their collective times out."""
    timeout = "__import__('datetime').timedelta(seconds=8)"
    body = (
        f"{NOTE_PID.format(folder=str(tmp_path))}; "
        f"dist.init_process_group('gloo', timeout={timeout}); dist.barrier(); "
        "os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else None; dist.barrier()"
    )
    job = launch(tmp_path, body, 3, EARLY)
    try:
        output, _ = job.communicate(timeout=120)
    finally:
        for pid in noted(tmp_path, 3):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
    assert job.returncode == 1, output
    assert "mindspeed: rank 1 is stopped and does not answer" in output
    (line,) = [line for line in output.splitlines() if "mindspeed pretrain [rank" in line]
    assert "rank 1 does not answer: the process is stopped" in line
    assert "killed or crashed" not in output


@pytest.mark.slow
def test_torchrun_report_ends_with_our_summary(tmp_path):
    body = "if rank == 1: raise MindSpeedError('--lr 0: at least 1e-9')"
    output, _ = (job := torchrun(tmp_path, body)).communicate(timeout=120)
    assert job.returncode == 1
    cause = output.partition("Root Cause")[2]
    assert "mindspeed pretrain [rank 1]: --lr 0: at least 1e-9" in cause, output


def torchrun(folder: Path, body: str) -> subprocess.Popen[str]:
    script = folder / "rank.py"
    script.write_text("from mindspeed.errors import MindSpeedError\n" + EARLY.format(body=body))
    unset = ("RANK", "WORLD_SIZE")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    return subprocess.Popen(
        [sys.executable, *command],
        env={k: v for k, v in os.environ.items() if k not in unset} | {"MINDSPEED_DEVICE": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


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


@pytest.mark.parametrize("ranks, threads", [(1, "1"), (2, "2"), (3, None)])
def test_ranks_know_each_other_share_the_cores_and_listen_on_loopback_only(
    ranks, threads, tmp_path, monkeypatch
):
    """Cores are shared unless OMP_NUM_THREADS is set."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    body = (
        "words = (rank, dist.get_world_size(), os.environ['MASTER_ADDR'], "
        "os.environ['OMP_NUM_THREADS'], torch.get_num_threads()); "
        "os.write(1, (' '.join(map(str, words)) + chr(10)).encode()); os._exit(0)"
    )
    job = launch(tmp_path, body, ranks)
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output
    share = threads or str(max(1, len(os.sched_getaffinity(0)) // ranks))
    expected = [f"{rank} {ranks} 127.0.0.1 {share} {share}" for rank in range(ranks)]
    assert sorted(output.split("\n")[:-1]) == expected


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
