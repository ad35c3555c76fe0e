"""Runs generated programs in isolated child processes with resource limits.

Every program runs in a separate Python (``-I -S``: no site-packages, no user files) with an empty
environment, a temporary directory, no open file but its output, its own session, and limits on CPU
time, memory, files and processes. All processes of a program are killed at the time limit, or when
they exceed a limit that the kernel does not enforce for a group of processes (their number, total
memory, disk space).

A program passes if it ends by itself with status 0 and has printed a random word as the last thing
after its tests. ``os._exit(0)`` in the middle prints none. A program that searches its own source
for the word can print it: this protects scores from accidents, not from malice.

Three mechanisms isolate it from the rest of the machine, each used if the machine supports it:

================ ==============================================================================
``bubblewrap``   a root directory with only the interpreter, system libraries and the program's
                 directory; no network, other processes invisible
``namespaces``   without bubblewrap: ``unshare``, no network, other processes invisible
Landlock,        in the child itself (:mod:`.sandbox`): allow-lists of files and of system calls
seccomp
================ ==============================================================================

:meth:`Isolation.gaps` lists what remains possible; a run prints it and writes it to its results.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from mindspeed.errors import ConfigError
from mindspeed.evaluation import sandbox
from mindspeed.files import SecurityWarning, atomic_write_text

_POLL_SECONDS = 0.02
_TAIL, _REASON = 4096, 200
_ENTRIES, _BLOCK = 1000, 512
# Uses what ordinary programs need: libraries, threads, random numbers, the clock, files.
_PROBE = """
import collections, ctypes, json, math, random, re, tempfile, threading, time, zlib
thread = threading.Thread(target=time.time)
thread.start()
thread.join()
with tempfile.TemporaryDirectory(dir=".") as folder, open(folder + "/x", "w+") as file:
    file.write(str(random.SystemRandom().random()))
"""


@dataclass(frozen=True)
class ResourceLimits:
    """Resource limits of a program.

    Attributes:
        seconds: Wall time; the CPU time limit is one second more.
        bytes: Address space of each process, and total memory.
        file_bytes: Size of every file, including its output.
        processes: Processes and threads, if it may start processes.
        disk_bytes: Total size of its files, of which there are at most 1000.
    """

    seconds: int = 10
    bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    processes: int = 16
    disk_bytes: int = 1 << 26


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program; ``reason`` is a message for users."""

    passed: bool
    reason: str


def require_consent(allowed: bool, task: str) -> None:
    """Refuse to run generated programs without the user's consent.

    Raises:
        ConfigError: The user did not allow it.
    """
    if not allowed:
        raise ConfigError(
            f"--task {task} runs programs that the model writes, with your permissions; to allow "
            "that, preferably inside a container, give --allow-code-execution"
        )


@cache
def best_isolation() -> Isolation:
    """The strongest isolation that works on this machine."""
    return next(available_isolations(), Isolation())


def available_isolations() -> Iterator[Isolation]:
    """Isolations in which an ordinary program runs on this machine, strongest first."""
    for candidate in candidate_isolations():
        if run_program(_PROBE, ResourceLimits(), candidate).passed:
            yield candidate


def warn_about_gaps() -> None:
    """Warn about actions that the isolation of this machine does not prevent."""
    active = best_isolation()
    if gaps := active.gaps():
        warnings.warn(
            f"generated programs run isolated by {active} and can {', '.join(gaps)}. Install "
            "bubblewrap and libseccomp, or run this in a container without network and without "
            "files of value, on a kernel that allows user namespaces or Landlock",
            SecurityWarning,
            stacklevel=2,
        )


def isolation_record() -> dict[str, Any]:
    """The isolation of the programs for the results, and what it does not prevent."""
    return {"isolation": str(best_isolation()), "not_prevented": list(best_isolation().gaps())}


def run_programs(
    programs: Sequence[str], progress: Callable[[int], object] | None = None
) -> list[ProgramResult]:
    """Run programs, several in parallel."""
    verdicts = []
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        for verdict in pool.map(run_program, programs):
            verdicts.append(verdict)
            if progress is not None:
                progress(1)
    return verdicts


def run_program(
    program: str, limits: ResourceLimits = ResourceLimits(), isolated_by: Isolation | None = None
) -> ProgramResult:
    """Run one program, which raises an exception if it is wrong.

    Args:
        program: Its source.
        isolated_by: Isolation; None: the strongest that works here.
    """
    isolated_by = isolated_by or best_isolation()
    word = secrets.token_hex(16)
    ending = f"\n__import__('sys').__stdout__.write({word!r})\n"
    with _directory() as directory:
        atomic_write_text(Path(directory) / "program.py", program + ending)
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                isolated_by.command(directory, _sandbox_arguments(limits, isolated_by)),
                cwd=directory,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            reason = _watch(process, limits, directory)
            text = _tail(output)
    if reason is not None:
        return ProgramResult(False, reason)
    if process.returncode != 0:
        last = (text.strip().splitlines() or [f"ended with status {process.returncode}"])[-1]
        return ProgramResult(False, last[:_REASON])
    if not text.endswith(word):
        return ProgramResult(False, "ended before its tests did")
    return ProgramResult(True, "passed")


def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mindspeed-program-", ignore_cleanup_errors=True)


def _sandbox_arguments(limits: ResourceLimits, isolated_by: Isolation) -> str:
    """Argument of :mod:`.sandbox`, as JSON."""
    return json.dumps(
        {
            "seconds": limits.seconds + 1,  # the wall clock ends it first, with a clear reason
            "bytes": limits.bytes,
            "file_bytes": limits.file_bytes,
            "processes": limits.processes,
            "landlock": bool(isolated_by.landlock),
            "seccomp": isolated_by.seccomp,
        }
    )


def _watch(process: subprocess.Popen[bytes], limits: ResourceLimits, directory: str) -> str | None:
    """Wait for the end; why it was forced, or None. Kills all processes of the program."""
    deadline = time.monotonic() + limits.seconds
    seen: dict[int, psutil.Process] = {}
    try:
        while process.poll() is None:
            for child in _descendants(process.pid):
                seen[child.pid] = child
            if len(seen) > limits.processes and _alive(seen) > limits.processes:
                return f"started more than {limits.processes} processes"
            if _memory(seen.values()) > limits.bytes:
                return f"used more than {limits.bytes >> 20} MiB of memory in all"
            if _disk(directory) > limits.disk_bytes:
                return f"wrote more than {limits.disk_bytes >> 20} MiB or {_ENTRIES} files"
            if time.monotonic() > deadline:
                return f"did not end within {limits.seconds} seconds"
            time.sleep(_POLL_SECONDS)
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


def _memory(processes: Iterable[psutil.Process]) -> int:
    """Total resident memory in bytes; shared pages count for each process."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def _disk(directory: str) -> float:
    """Bytes on disk below ``directory``; infinite if it has too many entries."""
    total = entries = 0
    try:
        for _, folders, files, handle in os.fwalk(directory):
            entries += len(folders) + len(files)
            if entries > _ENTRIES:
                return math.inf
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=handle, follow_symlinks=False)
                    total += status.st_blocks * _BLOCK
    except FileNotFoundError:  # a directory was removed during the walk
        pass
    return total


def _kill(process: subprocess.Popen[bytes], seen: dict[int, psutil.Process]) -> None:
    """Kill the process group, and descendants that left it."""
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


Wrapper = Literal["bubblewrap", "namespaces", "none"]
_COMMANDS: dict[Wrapper, str] = {"bubblewrap": "bwrap", "namespaces": "unshare", "none": ""}
_INSIDE, _SCRIPT_INSIDE = "/program", "/sandbox.py"
_NAMESPACES = "unshare --user --map-root-user --net --pid --ipc --fork --kill-child=KILL"


@dataclass(frozen=True)
class Isolation:
    """A combination of isolation mechanisms.

    Attributes:
        wrapper: The command that starts the program.
        landlock: Version of the kernel's Landlock; 0: not used.
        seccomp: Whether system calls are filtered.
    """

    wrapper: Wrapper = "none"
    landlock: int = 0
    seccomp: bool = False

    def __str__(self) -> str:
        parts: list[str] = [self.wrapper] if self.wrapper != "none" else []
        parts += [f"Landlock {self.landlock}"] if self.landlock else []
        parts += ["seccomp"] if self.seccomp else []
        return ", ".join([*parts, "resource limits"])

    def command(self, directory: str, limits: str) -> list[str]:
        """The command that runs ``program.py`` in ``directory``.

        Args:
            directory: The program's directory, which must be the working directory.
            limits: JSON for :mod:`.sandbox`.
        """
        script = str(Path(sandbox.__file__).resolve())
        python = os.path.realpath(sys.executable)
        if self.wrapper == "bubblewrap":
            prefix, script = _bubblewrap(directory, script), _SCRIPT_INSIDE
        else:
            prefix = [*_NAMESPACES.split(), "--"] if self.wrapper == "namespaces" else []
        return [*prefix, python, "-I", "-S", script, limits, "program.py"]

    def gaps(self) -> tuple[str, ...]:
        """Actions that this isolation does not prevent."""
        namespaces = self.wrapper != "none"
        private_root = self.wrapper == "bubblewrap"
        possible = {
            "read every file that you may read": not private_root and not self.landlock,
            "change every file that you may change": not private_root and not self.landlock,
            "change modes, times and attributes of your files": not private_root
            and not self.seccomp,
            "find out whether a file exists": not private_root,
            "see other processes and their command lines": not private_root and not self.landlock,
            "use the network": not namespaces and not self.seccomp,
            "send signals to your processes": not namespaces
            and not self.seccomp
            and self.landlock < sandbox.SCOPES_SINCE,
            "outlive its test": not namespaces and not self.seccomp,
            "use more memory than its limit for some hundredths of a second": not self.seccomp,
        }
        return tuple(deed for deed, is_possible in possible.items() if is_possible)


def candidate_isolations() -> Iterator[Isolation]:
    """Isolations that this machine may support, strongest first; they still have to be tried."""
    landlock, seccomp = sandbox.landlock_version(), sandbox.libseccomp() is not None
    present = [name for name, command in _COMMANDS.items() if not command or shutil.which(command)]
    for filters in dict.fromkeys(
        [(landlock, seccomp), (landlock, False), (0, seccomp), (0, False)]
    ):
        for wrapper in present:
            yield Isolation(wrapper, *filters)


def _bubblewrap(directory: str, script: str) -> list[str]:
    """A root directory with what the program needs; only its own directory is writable."""
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    for path in sandbox.readable():
        command += ["--ro-bind", path, path]
    command += ["--ro-bind", script, _SCRIPT_INSIDE, "--dev", "/dev", "--bind", directory, _INSIDE]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", _INSIDE, "--"]
