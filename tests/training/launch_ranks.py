"""Launchers and their ranks as forks of a rank that has imported torch, for ``test_launch.py``."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed.training import launch


class Fork:
    """What the launcher needs of ``subprocess.Popen``, for a Python script or ``-c`` and a text."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            os.environ.clear()
            os.environ.update(env)
            if command[1] == "-c":
                sys.argv = ["-c", *command[3:]]
                exec(command[2], {"__name__": "__main__"})
            else:
                runpy.run_path(command[-1], run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    script: str, ranks: int, folder: str, threads: str | None, terminate: bool = False
) -> tuple[int, str]:
    """Launch a script.

    Args:
        script: Path of a Python program.
        ranks: Number of ranks.
        folder: Where ranks note that they are ready.
        threads: OMP_NUM_THREADS of the launcher.
        terminate: Send SIGTERM to the launcher when all ranks are ready.

    Returns:
        The launcher's status, and what it and its ranks printed.
    """
    launch.subprocess.Popen = Fork
    os.environ.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = threads
    if terminate:
        threading.Thread(target=_terminate_this, args=(Path(folder), ranks), daemon=True).start()
    with _printed(Path(folder, "printed")) as text:
        status = launch.run_ranks([sys.executable, script], ranks)
    return status, text()


def _terminate_this(folder: Path, ranks: int) -> None:
    wait_for(lambda: len(list(folder.glob("ready*"))) == ranks)
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _printed(file: Path) -> Iterator[Callable[[], str]]:
    """What this process and its children print goes to a file, which the function reads."""
    saved = [os.dup(number) for number in (1, 2)]
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(target, number)
    try:
        yield file.read_text
    finally:
        for number, before in zip((1, 2), saved, strict=True):
            os.dup2(before, number)


def kill_the_launcher(script: str, ranks: int, folder: str) -> tuple[list[bool], list[bool]]:
    """Which ranks are alive before their launcher is killed, and ten seconds later at most."""
    launcher = os.fork()
    if launcher == 0:
        run(script, ranks, folder, None)
        os._exit(0)
    pids = wait_for(lambda: noted(Path(folder), ranks))
    before = [is_alive(pid) for pid in pids]
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return before, [is_alive(pid) for pid in pids]


def wait_for(found: Callable[[], Any], seconds: float = 90.0) -> Any:
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


def noted(folder: Path, ranks: int) -> list[int]:
    """The process ids that ranks wrote to ``pid0`` and so on, when all are there."""
    texts = [path.read_text() for path in sorted(folder.glob("pid*"))]
    return [int(text) for text in texts] if len(texts) == ranks and all(texts) else []
