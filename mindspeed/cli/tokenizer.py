"""``mindspeed tokenizer``: train a byte-level BPE tokenizer on text.

    mindspeed tokenizer --input corpus.jsonl --vocab-size 2048 --output tokenizer

The directory opens in ``transformers.AutoTokenizer`` and as ``--tokenizer-model`` here and in
Megatron-LM. Every text can be encoded and decoded without loss. Text is read into memory: tens of
megabytes are plenty for a vocabulary.
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
    """Add the flags of this sub-command."""
    parser.add_argument(
        "--input", type=Path, nargs="+", required=True, metavar="FILE", help="jsonl or plain text"
    )
    parser.add_argument("--json-key", default="text", help="field of a jsonl file (default: text)")
    parser.add_argument("--vocab-size", type=whole(1, MAX_SIZE), required=True, metavar="N")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing tokenizer")


def run(args: argparse.Namespace) -> int:
    """Train, write, and show how a sentence is cut."""
    from mindspeed.data.tokenizer import save_tokenizer, train_bpe

    if (args.output / "tokenizer.json").exists() and not args.overwrite:
        raise ConfigError(f"--output {args.output} has a tokenizer: choose another or --overwrite")
    for path in args.input:
        if not path.is_file():
            raise DataError(f"--input {path}: there is no such file")
    console = Console(stderr=True)
    with console.status("counting pairs of characters ..."):
        tokenizer = train_bpe(_texts(args.input, args.json_key), args.vocab_size)
    if tokenizer.get_vocab_size() < args.vocab_size:
        console.print(
            f"the text has pairs for {tokenizer.get_vocab_size()} entries only", highlight=False
        )
    save_tokenizer(tokenizer, args.output)
    pieces = " ".join(tokenizer.encode(EXAMPLE).tokens).replace("\u0120", "_")
    print(f"wrote {args.output} with {tokenizer.get_vocab_size()} entries; for example: {pieces}")
    return 0


def _texts(paths: list[Path], key: str) -> Iterator[str]:
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                for number, line in enumerate(file, start=1):
                    if path.suffix != ".jsonl":
                        yield line
                    elif line.strip():
                        yield _text(line, key, f"{path}:{number}")
        except UnicodeDecodeError as error:
            raise DataError(f"--input {path} is no text in UTF-8") from error


def _text(line: str, key: str, place: str) -> str:
    record = parse_json(line, place, DataError)
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        has = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{place}: no text under {key!r}; the record has {has}")
    return text
