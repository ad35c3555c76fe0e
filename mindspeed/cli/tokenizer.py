"""``mindspeed tokenizer``: train a byte-level BPE tokenizer on text.

    mindspeed tokenizer --input corpus.jsonl --vocab-size 2048 --output tokenizer

The directory works with ``transformers.AutoTokenizer`` and as ``--tokenizer-model`` here and in
Megatron-LM. Every text can be encoded and decoded without loss. The input is read into memory; tens
of megabytes are enough for a vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from mindspeed.errors import ConfigError, DataError
from mindspeed.parsing import parse_json
from mindspeed.ranges import MAX_SIZE, whole

HELP = "train a byte-level BPE tokenizer"
EXAMPLE = "The import statement finds a module"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", type=Path, nargs="+", required=True, metavar="FILE", help="jsonl or plain text")
    add("--json-key", default="text", help="field of a jsonl file")
    add(
        "--vocab-size",
        type=whole(1, MAX_SIZE),
        required=True,
        metavar="N",
        help="number of entries",
    )
    add("--output", type=Path, required=True, metavar="DIR", help="directory to write")
    add("--overwrite", action="store_true", help="replace an existing tokenizer")


def run(args: argparse.Namespace) -> int:
    """Train and write the tokenizer; print how it splits an example."""
    from mindspeed.data.tokenizer import save_tokenizer, train_bpe

    if (args.output / "tokenizer.json").exists() and not args.overwrite:
        raise ConfigError(
            f"--output {args.output} has a tokenizer: choose another directory, or give --overwrite"
        )
    for path in args.input:
        if not path.is_file():
            raise DataError(f"--input {path}: there is no such file")
    console = Console(stderr=True)
    with console.status("training the tokenizer ..."):
        tokenizer = train_bpe(_texts(args.input, args.json_key), args.vocab_size)
    if tokenizer.get_vocab_size() < args.vocab_size:
        console.print(f"the text yields only {tokenizer.get_vocab_size()} entries", highlight=False)
    save_tokenizer(tokenizer, args.output)
    pieces = " ".join(tokenizer.encode(EXAMPLE).tokens).replace("\u0120", "_")
    print(f"wrote {args.output} with {tokenizer.get_vocab_size()} entries; for example: {pieces}")
    return 0


def _texts(paths: list[Path], key: str) -> Iterator[str]:
    for path in paths:
        try:
            with open(path, encoding="utf-8-sig") as file:
                for number, line in enumerate(file, start=1):
                    if path.suffix != ".jsonl":
                        yield line
                    elif line.strip():
                        yield _text(line, key, f"{path}:{number}")
        except UnicodeDecodeError as error:
            raise DataError(f"--input {path} is not UTF-8 text") from error


def _text(line: str, key: str, place: str) -> str:
    record = parse_json(line, place, DataError)
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        has = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{place}: no text under {key!r}; the record has {has}")
    return text
