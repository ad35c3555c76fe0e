"""Isolation of generated programs from the rest of this machine.

Three mechanisms, each used if the machine supports it:

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


def candidates() -> Iterator[Isolation]:
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
