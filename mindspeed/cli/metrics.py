"""Reads the curves of ``metrics.jsonl`` files.

A file may end with an incomplete line if its run was killed, and may contain an iteration twice
after a resume: the later line counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.errors import DataError
from mindspeed.parsing import decode_json
from mindspeed.ranges import FINITE

METRICS_FILE = "metrics.jsonl"
LOSS, VALIDATION_LOSS = "lm_loss", "validation_loss"
_MOST_ITERATIONS = 2**53  # exact in double precision

Curve = Mapping[int, float]  # iteration -> value


@dataclass(frozen=True)
class Run:
    """The curves of one metrics file by key."""

    name: str
    curves: Mapping[str, Curve]
    unreadable_lines: int = 0

    def curve(self, key: str) -> Curve:
        """The curve of ``key``, empty if it was never recorded."""
        return self.curves.get(key, {})


def metrics_file(path: Path) -> Path:
    """The metrics file of a run.

    Raises:
        DataError: There is none.
    """
    if path.is_file():
        return path
    found = path / METRICS_FILE
    if not found.is_file():
        below = sorted(path.glob(f"*/{METRICS_FILE}")) if path.is_dir() else []
        hint = f"; there is {below[0]}" if below else ""
        raise DataError(f"{path} is not a run: it has no {METRICS_FILE}{hint}")
    return found


def read_runs(files: Sequence[Path]) -> list[Run]:
    """Read metrics files; runs are named by their directory, or by their path if that is equal."""
    names = [file.resolve().parent.name for file in files]
    if len(set(names)) < len(names):
        names = [str(file.parent) for file in files]
    return [read_run(file, name) for file, name in zip(files, names, strict=True)]


def read_run(file: Path, name: str) -> Run:
    """Read one metrics file.

    Raises:
        DataError: No line has an iteration and a finite loss.
    """
    curves: dict[str, dict[int, float]] = {}
    unreadable = 0
    for line in file.read_text("utf-8", errors="replace").splitlines():
        record = _record(line)
        if record is None:
            unreadable += bool(line.strip())
            continue
        for key, value in record.items():
            if _is_number(value):
                curves.setdefault(key, {})[record["iteration"]] = float(value)
    if LOSS not in curves:
        raise DataError(
            f"{file} has no line with 'iteration' and a finite '{LOSS}'; a run writes the first "
            "after --log-interval iterations"
        )
    return Run(
        name, {key: dict(sorted(curve.items())) for key, curve in curves.items()}, unreadable
    )


def _record(line: str) -> dict[str, Any] | None:
    """The line as a mapping with an iteration; None for half a line of a killed run."""
    try:
        record = decode_json(line)
    except ValueError:
        return None
    iteration = record.get("iteration") if isinstance(record, dict) else None
    return record if type(iteration) is int and 0 <= iteration < _MOST_ITERATIONS else None


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value in FINITE


def relative_errors(reference: Run, other: Run) -> Curve:
    """``(other - reference) / reference`` of the training losses, where both have one."""
    theirs = other.curve(LOSS)
    return {
        iteration: (theirs[iteration] - loss) / loss
        for iteration, loss in reference.curve(LOSS).items()
        if iteration in theirs and loss != 0
    }
