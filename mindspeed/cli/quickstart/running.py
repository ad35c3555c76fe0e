"""Runs a step: in this process, in a subprocess, or as a training whose progress is shown."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from mindspeed.cli.main import dispatch
from mindspeed.cli.quickstart.step import Step
from mindspeed.cli.watch import follow
from mindspeed.errors import ConfigError, MindSpeedError, TrainingError
from mindspeed.files import atomic_write_text, secure_open

INDENT = 6
LINES_SHOWN = 12


def run_step(step: Step, log: Path, console: Console) -> None:
    """Run one step and show what it printed.

    Args:
        step: The step.
        log: File for its standard error.
        console: Where to show its output.

    Raises:
        MindSpeedError: It failed.
    """
    if step.replaces is not None and step.replaces.exists() and not step.fresh():
        shutil.rmtree(step.replaces)
    if step.how == "training":
        _train(step, log, console)
        return
    try:
        text = (
            _run_in_process(step.command)
            if step.how == "in_process"
            else _run_subprocess(step.command, log, console)
        )
    except ConfigError as error:
        if not step.optional:
            raise
        show(console, f"skipped: {error}", "yellow")
        return
    if step.keeps_text:
        atomic_write_text(step.output, text)
    lines = [line for line in text.splitlines() if line.strip()]
    more = [f"... {len(lines) - LINES_SHOWN} more lines"] if len(lines) > LINES_SHOWN else []
    show(console, "\n".join(lines[:LINES_SHOWN] + more), "cyan" if step.keeps_text else "")


def show(console: Console, text: str, style: str = "") -> None:
    """Print text below the title of a step."""
    if text:
        console.print(Padding(Text(text, style=style), (0, 0, 0, INDENT)))


def _run_in_process(command: Sequence[str]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = dispatch(command[0], list(command[1:]))
    if status != 0:
        raise MindSpeedError(f"mindspeed {command[0]} failed: {output.getvalue().strip()}")
    return output.getvalue()


def _run_subprocess(command: Sequence[str], log: Path, console: Console) -> str:
    with secure_open(log) as errors, console.status(f"mindspeed {command[0]} ..."):
        process = _start(command, stdout=subprocess.PIPE, stderr=errors)
        try:
            text = process.communicate()[0].decode("utf-8", errors="replace")
        except KeyboardInterrupt:
            _stop(process)
            raise
    if process.returncode != 0:
        raise MindSpeedError(f"{text}{_tail(log)}mindspeed {command[0]} failed; see {log}")
    return text


def _train(step: Step, log: Path, console: Console) -> None:
    assert step.metrics is not None
    if step.trained:
        show(console, f"continuing after iteration {step.trained}")
    with secure_open(log, "a") as output:
        process = _start(step.command, stdout=output, stderr=subprocess.STDOUT)
        try:
            follow(process, step.metrics, step.trained, step.iterations, console)
        except KeyboardInterrupt:
            show(console, "stopping after the training has saved a checkpoint")
            _stop(process)
            raise
    if process.returncode != 0:
        raise TrainingError(f"{_tail(log)}the training failed; see {log}")


def _start(command: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start a command as a subprocess, without Python warnings by default."""
    environment = {**os.environ, "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore")}
    return subprocess.Popen(
        [sys.executable, "-m", "mindspeed", *command],
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches only us; we ask the training to save and stop
        **streams,
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def _tail(log: Path, lines: int = 25) -> str:
    kept = log.read_text("utf-8", errors="replace").splitlines()[-lines:]
    return "".join(f"{line}\n" for line in kept)
