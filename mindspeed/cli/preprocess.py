"""``mindspeed preprocess``: jsonl text to Megatron's ``.bin``/``.idx``.

    mindspeed preprocess --input corpus.jsonl --tokenizer-model tok/ --append-eod \\
        --output-prefix data/corpus --workers 4

writes ``data/corpus_text_document.bin`` and ``.idx``, ready for ``--data-path
data/corpus_text_document``. ``--input python-docs`` needs no file at all: it takes the
documentation that comes with Python.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mindspeed.data import corpus
from mindspeed.data import preprocess as data
from mindspeed.data.tokenizer import TokenizerOptions, add_tokenizer_arguments

LOG_INTERVAL_SECONDS = 15.0  # between lines when there is no terminal for a bar

HELP = "turn jsonl text into tokenized training data (.bin and .idx)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="jsonl files (also .gz) or directories of them; 'python-docs' takes the documentation "
        "of the running Python",
    )
    parser.add_argument(
        "--output-prefix",
        type=Path,
        required=True,
        metavar="PREFIX",
        help="data sets are written to PREFIX_KEY_document.bin and .idx",
    )
    parser.add_argument(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="fields to tokenize, one data set each (default: text)",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end every document with the end-of-text token"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    parser.add_argument(
        "--strict", action="store_true", help="stop at the first broken line instead of counting it"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing output")
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Preprocess and print what came out."""
    console = Console(stderr=True)
    options = data.PreprocessOptions(
        inputs=tuple(_input(name, args.output_prefix) for name in args.input),
        output_prefix=args.output_prefix,
        tokenizer=TokenizerOptions.from_args(args),
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        workers=args.workers,
        strict=args.strict,
        overwrite=args.overwrite,
    )
    print_report(preprocess_with_bar(options, console), console)
    return 0


def preprocess_with_bar(options: data.PreprocessOptions, console: Console) -> data.PreprocessReport:
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

        def show(totals: data.Progress) -> None:
            nonlocal next_line
            rate = _rate(totals)
            bar.update(task, total=totals.bytes_total, completed=totals.bytes_done, rate=rate)
            if not console.is_terminal and time.monotonic() > next_line:
                next_line = time.monotonic() + LOG_INTERVAL_SECONDS
                done = totals.bytes_done / max(totals.bytes_total, 1)
                _say(console, f"tokenizing: {done:.0%} done, {rate}")

        return data.preprocess(options, show)


def print_report(report: data.PreprocessReport, console: Console) -> None:
    """Say what was written, how fast, and which lines could not be used."""
    totals = report.totals
    _say(
        console,
        f"{totals.documents:,} documents, {totals.tokens:,} tokens of a vocabulary of "
        f"{report.vocab_size:,} in {totals.seconds:.1f} s ({_rate(totals)})",
    )
    if totals.empty:
        _say(console, f"{totals.empty:,} empty documents were left out", "yellow")
    if totals.broken:
        _say(console, f"{totals.broken:,} broken lines were left out, the first:", "yellow")
        for line in totals.first_broken:
            _say(console, f"  {line}", "yellow")
    for output in report.outputs:
        _say(console, f"wrote {output}.bin and .idx")


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _rate(totals: data.Progress) -> str:
    seconds = max(totals.seconds, 1e-9)
    return f"{totals.bytes_done / seconds / 1e6:.1f} MB/s, {totals.tokens / seconds:,.0f} tokens/s"


def _input(name: str, output_prefix: Path) -> Path:
    """The file of an input name; ``python-docs`` is written beside the output first."""
    path = Path(name)
    if name != corpus.SOURCE_NAME or path.exists():
        return path
    return corpus.write_python_docs(output_prefix.with_name(f"{name}.jsonl")).path
