"""How far generated programs are kept apart from the rest of this machine.

Three things can stand around a program; each is used where the machine allows it:

================ ==============================================================================
``bubblewrap``   a root directory with nothing but the interpreter, the system's libraries and the
                 program's own directory; no network, no view of other processes
``namespaces``   where bubblewrap is missing: ``unshare``, no network, no view of other processes
Landlock,        in the child itself (:mod:`.sandbox`): which files it reads and writes, which
seccomp          system calls it makes
================ ==============================================================================

What is left is said by :meth:`Isolation.gaps`, at the start of a run and in its results.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed.evaluation import sandbox

Wrapper = Literal["bubblewrap", "namespaces", "none"]
_COMMANDS: dict[Wrapper, str] = {"bubblewrap": "bwrap", "namespaces": "unshare", "none": ""}
_INSIDE, _SCRIPT_INSIDE = "/program", "/limited.py"
_NAMESPACES = "unshare --user --map-root-user --net --pid --ipc --fork --kill-child=KILL"


@dataclass(frozen=True)
class Isolation:
    """What stands around a program.

    Attributes:
        wrapper: The command that starts it.
        landlock: Version of the kernel's Landlock; 0: not used.
        seccomp: Its system calls are filtered.
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
        """What runs ``program.py`` of ``directory``.

        Args:
            directory: Of the program, the present one.
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
        """What a program can do in spite of this."""
        apart = self.wrapper != "none"
        private = self.wrapper == "bubblewrap"
        possible = {
            "read every file that you may read": not private and not self.landlock,
            "change every file that you may change": not private and not self.landlock,
            "change modes, times and attributes of your files": not private and not self.seccomp,
            "find out whether a file exists": not private,
            "see other processes and their command lines": not private and not self.landlock,
            "use the network": not apart and not self.seccomp,
            "send signals to your processes": not apart
            and not self.seccomp
            and self.landlock < sandbox.SCOPES_SINCE,
            "outlive its test": not apart and not self.seccomp,
            "use more memory than its limit for some hundredths of a second": not self.seccomp,
        }
        return tuple(deed for deed, is_possible in possible.items() if is_possible)


def candidates() -> Iterator[Isolation]:
    """What could be had on this machine, the safest first; whether it works is another question."""
    landlock, seccomp = sandbox.landlock_version(), sandbox.libseccomp() is not None
    present = [name for name, command in _COMMANDS.items() if not command or shutil.which(command)]
    for filters in dict.fromkeys(
        [(landlock, seccomp), (landlock, False), (0, seccomp), (0, False)]
    ):
        for wrapper in present:
            yield Isolation(wrapper, *filters)


def _bubblewrap(directory: str, script: str) -> list[str]:
    """A root directory of what the program needs, on which it can write its own directory only."""
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    for path in sandbox.readable():
        command += ["--ro-bind", path, path]
    command += ["--ro-bind", script, _SCRIPT_INSIDE, "--dev", "/dev", "--bind", directory, _INSIDE]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", _INSIDE, "--"]
