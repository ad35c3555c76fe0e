"""Shows the progress of a training in another process, from its metrics file.

A progress bar with loss, throughput and remaining time, and regular lines above it, which remain in
a log without a terminal.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mindspeed.parsing import decode_json

POLL_SECONDS = 0.25
LINES_PER_RUN = 20


def follow(
    process: subprocess.Popen[bytes], metrics: Path, done: int, total: int, console: Console
) -> None:
    """Show new records of ``metrics`` until ``process`` ends.

    Args:
        process: The training.
        metrics: Its metrics file, which need not exist yet; records already in it are not shown.
        done: Iterations done before.
        total: Total number of iterations.
        console: Where to draw.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    position = metrics.stat().st_size if metrics.exists() else 0
    next_line = done
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting processes", total=total, completed=done)
        ended = False
        while not ended:
            time.sleep(POLL_SECONDS)
            ended = process.poll() is not None
            records, position = new_records(metrics, position)
            for record in records:
                iteration = record["iteration"]
                if record.get("validation_loss") is not None:
                    _say(console, iteration, f"validation loss {record['validation_loss']:.3f}")
                if record.get("lm_loss") is not None:
                    text = _describe(record)
                    bar.update(task, completed=iteration, description=text)
                    if iteration >= next_line:
                        next_line = iteration + max(total // LINES_PER_RUN, 1)
                        _say(console, iteration, text)


def new_records(path: Path, position: int) -> tuple[list[dict[str, Any]], int]:
    """Complete lines of a metrics file after ``position``; a resumed run may truncate the file."""
    if not path.exists():
        return [], 0
    with open(path, "rb") as file:
        position = min(position, path.stat().st_size)
        file.seek(position)
        text = file.read()
    complete = text[: text.rfind(b"\n") + 1]
    records = []
    for line in complete.splitlines():
        try:
            records.append(decode_json(line))
        except json.JSONDecodeError:  # the file was truncated in the meantime
            continue
    return records, position + len(complete)


def _say(console: Console, iteration: int, text: str) -> None:
    console.print(f"      {iteration:5d}  {text}", highlight=False, markup=False)


def _describe(record: dict[str, Any]) -> str:
    minutes, seconds = divmod(int(record.get("eta_seconds") or 0), 60)
    speed = f"{record['tokens_per_second']:,.0f} tokens/s"
    return f"loss {record['lm_loss']:.3f}   {speed}   {minutes}:{seconds:02d} left"
