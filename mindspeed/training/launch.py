"""Local ranks without torchrun: ``mindspeed pretrain --nproc 4`` on one machine.

Every rank is ``python -m mindspeed pretrain <same flags>`` with torch.distributed's environment.
The rendezvous store lives in this process, on 127.0.0.1 and a port the system chose, so nothing is
reachable from outside and two launches never collide. Cores are shared out among the ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType
from typing import cast

import torch.distributed as dist

from mindspeed.device import torch_versions
from mindspeed.processes import cores
from mindspeed.training.fail_together import LAUNCHER, report_failure

_POLL_SECONDS = 0.05
_SECONDS_TO_STOP = 10.0


def inside_a_job() -> bool:
    """Whether a launcher (torchrun, Slurm, Kubernetes, :func:`run_ranks`) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(command: Sequence[str], ranks: int) -> int:
    """Run ``command`` once per rank and wait.

    When one rank fails the others are stopped within seconds; what ends or stops a rank from
    outside is reported here, because the rank cannot. SIGTERM and SIGINT are passed to
    the ranks, which save and end by themselves.

    Args:
        command: program and arguments.
        ranks: number of processes.

    Returns:
        0 if all ranks returned 0, else the status of the first that did not.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(minutes=10),
        master_listen_fd=listener.detach(),
        use_libuv=torch_versions.libuv_store_takes_a_socket(),
    )
    processes = [
        subprocess.Popen(command, env=_environment(rank, ranks, port)) for rank in range(ranks)
    ]
    with _ForwardedSignals(processes):
        status = _wait(processes, store)
    del store
    return status


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0",
        "TORCH_GLOO_LAZY_INIT": "1",
    }
    return {
        **defaults,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER: str(os.getpid()),
    }


def _wait(processes: Sequence[subprocess.Popen[bytes]], store: dist.Store) -> int:
    stopped: set[int] = set()
    while True:
        states = [process.poll() for process in processes]
        failed = [rank for rank, state in enumerate(states) if state not in (None, 0)]
        if failed:
            # A signal is the cause; the ranks that it did not reach fail after it.
            rank = next((r for r in failed if cast(int, states[r]) < 0), failed[0])
            state = cast(int, states[rank])
            if state < 0:
                _say(f"rank {rank} was ended by {_signal_name(-state)}")
            report_failure(store, rank)
            _stop(processes)
            return state if state > 0 else 128 - state
        if all(state == 0 for state in states):
            return 0
        stopped = _report_stopped(processes, stopped)
        time.sleep(_POLL_SECONDS)


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (killed, for example for want of memory)" if name == "SIGKILL" else name


def _report_stopped(processes: Sequence[subprocess.Popen[bytes]], known: set[int]) -> set[int]:
    """Name the ranks that were stopped since the last look; returns all that are stopped."""
    now = {rank for rank, process in enumerate(processes) if _is_stopped(process.pid)}
    for rank in sorted(now - known):
        pid = processes[rank].pid
        _say(f"rank {rank} is stopped and does not answer; kill -CONT {pid} continues it")
    return now


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (``T`` in Linux's process table)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def _say(line: str) -> None:
    print(f"mindspeed: {line}", file=sys.stderr, flush=True)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Give the other ranks a moment to notice by themselves, then end them."""
    deadline = time.monotonic() + _SECONDS_TO_STOP
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


class _ForwardedSignals:
    """Context manager: forwards SIGTERM and SIGINT to the ranks instead of ending the launcher."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def __enter__(self) -> None:
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._hand_on) for number in numbers}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)
