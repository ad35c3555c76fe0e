"""``mindspeed corpus``: small training data from this Python's documentation, without network.

    mindspeed corpus --output practice

writes pretraining text (two million characters), instructions for fine-tuning, evaluation questions
in BoolQ's format, and a chat template for them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

HELP = "write small training data from this Python's documentation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="directory to write"
    )


def run(args: argparse.Namespace) -> int:
    """Write the files and print their sizes."""
    from mindspeed.data import quickstart_corpus

    with Console(stderr=True).status("reading the documentation of this Python ..."):
        files, summary = quickstart_corpus.write(args.output)
    print(f"{files.corpus}: {summary.documents} documents, {summary.characters:,} characters")
    for path, what in (
        (files.instructions, "instructions"),
        (files.evaluation, "evaluation questions"),
    ):
        print(f"{path}: {len(path.read_text('utf-8').splitlines())} {what}")
    print(f"{files.template}: chat template for questions and answers")
    return 0
