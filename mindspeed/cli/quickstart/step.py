"""A step of the quickstart: a ``mindspeed`` command with its input and output files.

A step is done when its output exists and is not older than its inputs; a training is done when its
latest checkpoint has all iterations.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Names the latest checkpoint of a directory; written last, so it also says when it was finished.
TRACKER = "latest_checkpointed_iteration.txt"

# Where a command runs: in this process, in a subprocess, or in one whose progress is shown.
How = Literal["in_process", "subprocess", "training"]


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        title: Description.
        command: Arguments of ``mindspeed``.
        output: The last file that it writes.
        inputs: Files that it depends on.
        how: Where it runs.
        iterations: Iterations of a training.
        metrics: Metrics file of a training.
        keeps_text: Write its standard output to ``output``.
        replaces: Directory that the command creates; an outdated one is removed first.
        optional: Skip the step if a package for it is missing.
    """

    title: str
    command: tuple[str, ...]
    output: Path
    inputs: tuple[Path, ...] = ()
    how: How = "in_process"
    iterations: int = 0
    metrics: Path | None = None
    keeps_text: bool = False
    replaces: Path | None = None
    optional: bool = False

    @property
    def trained(self) -> int:
        """Iterations of the latest checkpoint of a training."""
        text = self.output.read_text("utf-8").strip() if self.output.exists() else ""
        return int(text) if text.isdecimal() else 0

    def fresh(self) -> bool:
        """Whether the output exists and no input is newer."""
        if not self.output.exists():
            return False
        written = self.output.stat().st_mtime_ns
        return all(path.exists() and path.stat().st_mtime_ns <= written for path in self.inputs)

    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.fresh() and (self.how != "training" or self.trained >= self.iterations)


def words(command: str, *switches: str, **flags: Any) -> tuple[str, ...]:
    """A command line from Python values.

    Args:
        command: Name of the command.
        switches: Flags without a value.
        flags: Flags with a value, or with several (a tuple repeats the flag); ``runs`` are
            arguments without a flag.
    """
    result = [command, *map(str, flags.pop("runs", ()))]
    for name, value in flags.items():
        for item in value if isinstance(value, tuple) else (value,):
            result.append(f"--{name.replace('_', '-')}={item}")
    return (*result, *(f"--{switch}" for switch in switches))


def typed(command: tuple[str, ...], width: int = 96) -> str:
    """The command as typed in a shell, wrapped over several lines."""
    lines = ["mindspeed"]
    for word in command:
        name, _, value = word.partition("=")
        text = f"{name} {_quoted(value)}" if word.startswith("--") and value else word
        if len(lines[-1]) + len(text) + 3 > width:
            lines.append("   ")
        lines[-1] += f" {text}"
    return " \\\n".join(lines)


def _quoted(value: str) -> str:
    """One shell word; with newlines in bash's $'...' form."""
    if "\n" not in value:
        return shlex.quote(value)
    escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{escaped}'"
