"""What preprocessing shows: its progress bar, its result, samples with trained tokens in colour."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from mindspeed.data.loss_mask import IGNORED, TokenizedConversation
from mindspeed.data.preprocess import PreprocessReport, preprocess
from mindspeed.data.preprocess import Progress as Totals
from mindspeed.data.preprocess_options import PreprocessOptions
from mindspeed.data.tokenizer_types import TextTokenizer

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


TRAINED = "bold green"
MOST_CHARACTERS = 2000
"""Longer samples are shown without their middle."""


def decoded(sample: TokenizedConversation, tokenizer: TextTokenizer) -> Text:
    """The text of a sample; tokens with a label have the style :data:`TRAINED`."""
    trained = sample.labels != IGNORED
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(trained)]
    text = Text()
    for start, end in pairwise(edges):
        if start < end:
            part = _text(sample.ids[start:end].tolist(), tokenizer)
            text.append(part, TRAINED if trained[start] else "")
    return text


def _text(ids: list[int], tokenizer: TextTokenizer) -> str:
    """The text of ids with special tokens, which a tokenizer leaves out when it decodes."""
    special = {one: not tokenizer.detokenize([one]) for one in set(ids)}
    return "".join(
        "".join(tokenizer.piece(one) or "" for one in group)
        if left_out
        else tokenizer.detokenize(list(group))
        for left_out, group in groupby(ids, special.__getitem__)
    )


def print_samples(
    samples: list[TokenizedConversation],
    tokenizer: TextTokenizer,
    console: Console,
    first: int = 1,
    parts: Sequence[str] = (),
) -> None:
    """Print samples, each below a line with its sizes.

    Args:
        samples: what to print.
        tokenizer: that decodes them.
        console: without colours, trained parts are in brackets.
        first: number of the first one.
        parts: names of the parts of a sample, each of which is one of ``samples``.
    """
    names = [f", {part}" for part in parts] or [""]
    for index, sample in enumerate(samples):
        count = int((sample.labels != IGNORED).sum())
        number, part = divmod(index, len(names))
        what = f"sample {first + number}{names[part]}"
        head = f"{what}: {len(sample.ids):,} tokens, {count:,} of them trained"
        console.print(Text(head, "dim"), soft_wrap=True)
        text = decoded(sample, tokenizer)
        if console.color_system is None:
            text = _bracketed(text)
        if len(text) > MOST_CHARACTERS:
            half = MOST_CHARACTERS // 2
            text = Text("\n[...]\n", "dim").join([text[:half], text[-half:]])
        console.print(text, soft_wrap=True)


def _bracketed(text: Text) -> Text:
    """The text with marks around what is trained, for files and terminals without colours."""
    plain, at, parts = text.plain, 0, []
    for span in text.spans:
        parts += [plain[at : span.start], "\u27e6", plain[span.start : span.end], "\u27e7"]
        at = span.end
    return Text("".join([*parts, plain[at:]]))
