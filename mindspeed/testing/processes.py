"""Setup of a forked test process: own process group, output file, stack dumps on a signal."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path

from mindspeed.processes import die_with_parent

STACK_DUMP_SIGNAL = signal.SIGUSR1


def settle_child(output: Path, stacks: Path) -> None:
    """Set up a forked child: it can be killed, writes to a file, and dumps its stacks.

    The child leads its own process group, dies with its parent, writes its output to
    `output`, and on STACK_DUMP_SIGNAL writes the stacks of all its threads to `stacks`.
    """
    os.setpgid(0, 0)
    die_with_parent()
    _redirect_output(output)
    stack_file = open(stacks, "w")  # noqa: SIM115 (lives as long as the process)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_DUMP_SIGNAL, file=stack_file, all_threads=True)


def _redirect_output(path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = open(descriptor, "w", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def kill_child(pid: int) -> None:
    """Kill a child and its child processes, and wait for its end."""
    for kill in (os.killpg, os.kill):  # it may not lead its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def exit_text(status: int) -> str:
    """A wait status as text."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    return f"exited with code {code}"


def tail(path: Path, size: int) -> str:
    """The last `size` bytes of a file as text; nothing if the file does not exist."""
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")
