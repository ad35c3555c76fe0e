"""Runs a benchmark of this repository as a user does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run ``benchmarks/NAME.py`` with these words; what it prints is captured."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def quick_run(name: str, out: Path) -> str:
    """Run it with ``--quick`` until its files are written to ``out``, and return what it prints."""
    done = run(name, "--quick", "--out", out)
    assert done.returncode == 0, done.stderr
    return done.stdout
