"""Generated programs, run in limited child processes. This is mitigation, not a sandbox.

Every program gets a Python of its own (``-I -S``: no environment, no site-packages, no user
files), an empty environment, a temporary directory that is removed afterwards, no open file but its
output, a session of its own, and limits on processor time, address space, file size, open files and
processes. It cannot write outside its directory where the kernel has Landlock (:mod:`.limited`),
and has no network and no view of other processes where ``unshare`` may make namespaces; what is
missing on this machine is said loudly once. When the time is over, or there are too many
processes, all of them are killed: ``RLIMIT_NPROC`` does not bind root, so they are also counted.

A program passes when it ends by itself with status 0 and has printed, as the last thing after its
tests, a random word. ``os._exit(0)`` in the middle prints none. A program that goes looking for the
word in its own source can print it: this keeps scores from accidents, not from malice.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import psutil

from mindspeed.errors import ConfigError
from mindspeed.evaluation import limited
from mindspeed.files import SecurityWarning, atomic_write_text

_LOOK_EVERY = 0.02
_NAMESPACES = ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child=KILL")
_TAIL, _REASON = 4096, 200


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: Of wall time; a process may use one second more of the processor.
        bytes: Of address space.
        file_bytes: Of every file, its output included.
        processes: Processes and threads.
    """

    seconds: int = 10
    bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    processes: int = 16


@dataclass(frozen=True)
class Verdict:
    """What became of a program; ``reason`` is for people."""

    passed: bool
    reason: str


def require_consent(allowed: bool, task: str) -> None:
    """Stop unless the user wants generated programs to run.

    Raises:
        ConfigError: He did not say so.
    """
    if not allowed:
        raise ConfigError(
            f"--task {task} runs programs that the model writes, with your rights; if you want "
            "that, best inside a container, give --allow-code-execution"
        )


def warn_about_gaps() -> None:
    """Say what this machine cannot keep a program from."""
    gaps = []
    if not _namespaces():
        tcp = "beyond TCP " if limited.landlock_version() > 3 else ""
        gaps.append(f"use the network {tcp}and outlive its test in a session of its own")
    if not limited.landlock_version():
        gaps.append("change every file that you may change")
    if gaps:
        warnings.warn(
            f"generated programs can {' and '.join(gaps)} on this machine: the kernel or the "
            "container does not allow namespaces or Landlock. Run this in a container without "
            "network and without files of value",
            SecurityWarning,
            stacklevel=2,
        )


def check_all(
    programs: Sequence[str],
    limits: Limits = Limits(),
    progress: Callable[[int], object] | None = None,
) -> list[Verdict]:
    """Run programs, several at a time."""
    verdicts = []
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        for verdict in pool.map(lambda program: check(program, limits), programs):
            verdicts.append(verdict)
            if progress is not None:
                progress(1)
    return verdicts


def check(program: str, limits: Limits = Limits()) -> Verdict:
    """Run one program that raises when it is wrong."""
    word = secrets.token_hex(16)
    ending = f"\n__import__('sys').__stdout__.write({word!r})\n"
    with _directory() as directory:
        atomic_write_text(Path(directory) / "program.py", program + ending)
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                _command(limits),
                cwd=directory,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            reason = _watch(process, limits)
            text = _tail(output)
    if reason is not None:
        return Verdict(False, reason)
    if process.returncode != 0:
        last = (text.strip().splitlines() or [f"ended with status {process.returncode}"])[-1]
        return Verdict(False, last[:_REASON])
    if not text.endswith(word):
        return Verdict(False, "ended before its tests did")
    return Verdict(True, "passed")


def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mindspeed-program-", ignore_cleanup_errors=True)


def _command(limits: Limits) -> list[str]:
    values = {
        "seconds": limits.seconds + 1,  # of the processor: the clock ends a program and says so
        "bytes": limits.bytes,
        "file_bytes": limits.file_bytes,
        "processes": limits.processes,
    }
    python = [sys.executable, "-I", "-S", str(Path(limited.__file__).resolve())]
    return [*_namespaces(), *python, json.dumps(values), "program.py"]


@cache
def _namespaces() -> tuple[str, ...]:
    """What starts a program in namespaces of its own; empty where they cannot be had.

    Many containers do not allow them.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    prefix = (unshare, *_NAMESPACES, "--")
    command = [*prefix, sys.executable, "-I", "-S", "-c", ""]
    done = subprocess.run(command, env={}, capture_output=True, check=False)
    return prefix if done.returncode == 0 else ()


def _watch(process: subprocess.Popen[bytes], limits: Limits) -> str | None:
    """Wait for the end; why it was forced, or None. No process of the program is left."""
    deadline = time.monotonic() + limits.seconds
    seen: dict[int, psutil.Process] = {}
    try:
        while process.poll() is None:
            for child in _descendants(process.pid):
                seen[child.pid] = child
            if len(seen) > limits.processes and _alive(seen) > limits.processes:
                return f"started more than {limits.processes} processes"
            if time.monotonic() > deadline:
                return f"did not end within {limits.seconds} seconds"
            time.sleep(_LOOK_EVERY)
        return None
    finally:
        _kill(process, seen)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _alive(seen: dict[int, psutil.Process]) -> int:
    return sum(child.is_running() for child in seen.values())


def _kill(process: subprocess.Popen[bytes], seen: dict[int, psutil.Process]) -> None:
    """The group, and whoever left it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in seen.values():
        with contextlib.suppress(psutil.Error):
            child.kill()
    process.wait()


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL))
    return output.read().decode("utf-8", errors="replace")
