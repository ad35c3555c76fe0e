"""``mindspeed corpus``: practice material from the documentation of this Python, without internet.

    mindspeed corpus --output practice

writes a text to pretrain on (two million characters), instructions to tune on, and a small exam in
BoolQ's format, with a template that says how a question and its answer become text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

HELP = "write practice data from this Python's documentation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Write the files and say what is in them."""
    from mindspeed.data import quickstart_corpus

    with Console(stderr=True).status("reading the documentation of this Python ..."):
        files, summary = quickstart_corpus.write(args.output)
    print(f"{files.corpus}: {summary.documents} documents, {summary.characters:,} characters")
    for path, what in (
        (files.instructions, "instructions"),
        (files.evaluation, "evaluation questions"),
    ):
        print(f"{path}: {len(path.read_text('utf-8').splitlines())} {what}")
    print(f"{files.template}: how a question and its answer become text")
    return 0
