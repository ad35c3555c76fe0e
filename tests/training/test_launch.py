"""Local ranks: environment, signals, and a failing rank ends all.

Launchers and ranks are forks (:mod:`tests.training.launch_ranks`) where a test is not about what a
new process inherits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training import launch_ranks
from tests.training.launch_ranks import is_alive, noted, wait_for

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
SETUP = "tests.support.warm"
LAUNCH = """
import sys
from mindspeed.training.launch import run_ranks
sys.exit(run_ranks([sys.executable, sys.argv[1]], int(sys.argv[2])))
"""


# A body that ends with os._exit(0) leaves nothing to tear down: gloo may abort a process that ends
# without having left its job (mindspeed.training.setup.leave_job).


def write(folder: Path, body: str, program: str = RANK) -> str:
    """Path of a program with its body."""
    script = folder / "rank.py"
    script.write_text(program.replace("{body}", body))
    return str(script)


@pytest.fixture
def launch(ranks, tmp_path):
    """``launch(body, count, program)``: status and output of a launcher and its ranks."""

    def run(body, count, program=RANK, threads="1", terminate=False):
        given = write(tmp_path, body, program), count, str(tmp_path), threads, terminate
        return ranks(1, launch_ranks.run, *given, setup=SETUP, backend=None, timeout=200)[0]

    return run


def test_a_rank_that_raises_ends_all_ranks_and_only_its_error_is_shown(launch):
    status, output = launch('if rank == 2: raise TrainingError("iteration 7: the loss is nan")', 3)
    assert status == 1
    assert output.count("mindspeed pretrain [rank") == 1
    assert "mindspeed pretrain [rank 2]: iteration 7: the loss is nan" in output
    assert "Traceback" not in output


def test_a_killed_rank_ends_all_ranks_and_the_others_report(launch):
    status, output = launch("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", 3)
    assert status == 128 + signal.SIGKILL
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
        (
            "os.kill(os.getpid(), signal.SIGSEGV) if rank == 0 else None",
            "rank 0 was ended by SIGSEGV",
        ),
        ("assert rank != 1, 'no room'", "[rank 1]: unexpected AssertionError: no room"),
    ],
)
def test_the_cause_is_shown_when_a_rank_dies_before_rendezvous(launch, body, said):
    started = time.monotonic()
    status, output = launch(body, 2, EARLY)
    assert status != 0
    assert said in output
    assert "lost contact" not in output and "Traceback" not in output
    assert time.monotonic() - started < 100, "the others did not wait for it"


NOTE_PID = "open({folder!r} + f'/pid{{rank}}', 'w').write(str(os.getpid()))"


def test_ranks_end_when_their_launcher_is_killed(ranks, tmp_path):
    """Those that are blocked, too: they wait for a lock that never comes."""
    note = NOTE_PID.format(folder=str(tmp_path))
    script = write(tmp_path, f"{note}; import threading; threading.Event().wait()", EARLY)
    given = {"setup": SETUP, "backend": None, "timeout": 200}
    ((before, after),) = ranks(1, launch_ranks.kill_the_launcher, script, 2, str(tmp_path), **given)
    assert all(before) and not any(after)


@pytest.mark.slow
def test_ranks_end_when_torchrun_is_killed(tmp_path):
    note = NOTE_PID.format(folder=str(tmp_path))
    job = torchrun(tmp_path, f"{note}; import threading; threading.Event().wait()")
    pids = wait_for(lambda: noted(tmp_path, 2))
    job.kill()
    assert wait_for(lambda: not any(map(is_alive, pids)), 10)


@pytest.mark.slow  # the collective must time out
def test_a_stopped_rank_is_reported_as_unresponsive(launch, tmp_path):
    """By the launcher at once, by the other ranks when their collective times out."""
    timeout = "__import__('datetime').timedelta(seconds=8)"
    body = (
        f"{NOTE_PID.format(folder=str(tmp_path))}; "
        f"dist.init_process_group('gloo', timeout={timeout}); dist.barrier(); "
        "os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else None; dist.barrier()"
    )
    status, output = launch(body, 3, EARLY)
    assert status == 1, output
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


def test_sigterm_to_the_launcher_reaches_every_rank(launch, tmp_path):
    body = (
        "signal.signal(signal.SIGTERM, lambda *a: os._exit(0)); "
        f"open({str(tmp_path)!r} + f'/ready{{rank}}', 'w').close(); time.sleep(60)"
    )
    status, output = launch(body, 2, terminate=True)
    assert status == 0, output


KNOWN = "rank, dist.get_world_size(), os.environ['MASTER_ADDR'], os.environ['OMP_NUM_THREADS']"
SAY = "words = ({}); os.write(1, (' '.join(map(str, words)) + chr(10)).encode()); os._exit(0)"


@pytest.mark.parametrize("count, threads", [(1, "1"), (2, "2"), (3, None)])
def test_ranks_know_each_other_share_the_cores_and_listen_on_loopback_only(count, threads, launch):
    """Cores are shared unless OMP_NUM_THREADS is set."""
    status, output = launch(SAY.format(KNOWN), count, threads=threads)
    assert status == 0, output
    share = threads or str(max(1, len(os.sched_getaffinity(0)) // count))
    expected = [f"{rank} {count} 127.0.0.1 {share}" for rank in range(count)]
    lines = [line for line in output.split("\n")[:-1] if not line.startswith("[Gloo]")]
    assert sorted(lines) == expected


@pytest.mark.slow
def test_new_processes_have_as_many_threads_as_their_launcher_says(tmp_path):
    script = write(tmp_path, SAY.format("rank, torch.get_num_threads()"))
    job = subprocess.run(
        [sys.executable, "-c", LAUNCH, script, "2"],
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        | {"MINDSPEED_DEVICE": "cpu", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split("\n")[:-1]) == ["0 2", "1 2"]


@pytest.mark.slow
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
