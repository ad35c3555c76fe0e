"""The progress bar of preprocessing, and what is printed about its result."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mindspeed.data.preprocess import PreprocessReport, preprocess
from mindspeed.data.preprocess import Progress as Totals
from mindspeed.data.preprocess_options import PreprocessOptions

LOG_INTERVAL_SECONDS = 15.0  # between lines when there is no terminal for a bar


def preprocess_with_bar(options: PreprocessOptions, console: Console) -> PreprocessReport:
    """Run :func:`mindspeed.data.preprocess.preprocess` under a progress bar."""
    columns = (
        SpinnerColumn(),
        TextColumn("tokenizing"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("tokenizing", total=None, rate="starting")
        next_line = time.monotonic() + LOG_INTERVAL_SECONDS

        def show(totals: Totals) -> None:
            nonlocal next_line
            rate = _rate(totals)
            total = totals.bytes_total or None  # a stream has no length
            bar.update(task, total=total, completed=totals.bytes_done, rate=rate)
            if not console.is_terminal and time.monotonic() > next_line:
                next_line = time.monotonic() + LOG_INTERVAL_SECONDS
                done = totals.bytes_done / max(totals.bytes_total, 1)
                say(console, f"tokenizing: {done:.0%} done, {rate}")

        return preprocess(options, show)


def print_report(report: PreprocessReport, console: Console) -> None:
    """Print what was written, the throughput, and the first invalid lines."""
    totals = report.totals
    say(
        console,
        f"{totals.documents:,} documents, {totals.tokens:,} tokens of a vocabulary of "
        f"{report.vocab_size:,} in {totals.seconds:.1f} s ({_rate(totals)})",
    )
    print_remarks(report, console)
    for output in report.outputs:
        say(console, f"wrote {output}.bin and .idx")


def print_remarks(report: PreprocessReport, console: Console) -> None:
    """Print what was left out, changed or not used."""
    totals = report.totals
    if totals.empty:
        say(console, f"{totals.empty:,} empty documents were skipped", "yellow")
    if totals.broken:
        say(console, f"{totals.broken:,} invalid lines were skipped, the first:", "yellow")
        for line in totals.first_broken:
            say(console, f"  {line}", "yellow")
    if totals.trained < totals.tokens:
        say(console, f"{totals.trained / totals.tokens:.1%} of the tokens have labels")
    if totals.shortened:
        say(
            console,
            f"{totals.shortened:,} samples were truncated to --seq-length, {totals.lost:,} tokens "
            "of answers are not trained",
            "yellow",
        )
    if totals.untrained:
        say(console, f"{totals.untrained:,} samples without labels were skipped", "yellow")
    for remark, count in totals.remarks.items():
        say(console, f"{count:,} {remark}", "yellow")
    for note in report.notes:
        say(console, note)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line that may be longer than the terminal is wide."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _rate(totals: Totals) -> str:
    seconds = max(totals.seconds, 1e-9)
    return f"{totals.bytes_done / seconds / 1e6:.1f} MB/s, {totals.tokens / seconds:,.0f} tokens/s"
