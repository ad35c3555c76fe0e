"""Final values of the data: paths of data sets, and the vocabulary of the tokenizer."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megatron.core.datasets.utils import get_blend_from_list

from mindspeed.adaptor.versions.tokenizers import null_vocab_size
from mindspeed.data.instruction_dataset import part_prefixes
from mindspeed.data.tokenizer import build_tokenizer, check_fits
from mindspeed.data.tokenizer_types import TextTokenizer, TokenizerOptions
from mindspeed.errors import ConfigError, DataError
from mindspeed.files import check_path
from mindspeed.flags import read
from mindspeed.training.data import SPLITS, weighted_parts
from mindspeed.training.options import DataOptions


def load_tokenizer(args: argparse.Namespace) -> TextTokenizer:
    """Build the tokenizer and derive the padded vocabulary size from it.

    A model of a family has as many entries as its ``config.json`` says, which may be more.
    """
    options = TokenizerOptions.from_args(args)
    only_ids, masked = args.tokenizer_type == "NullTokenizer", args.mask_padded_vocab
    vocab_size, padded = args.vocab_size, args.padded_vocab_size
    if only_ids and masked and vocab_size:
        # The model's entries are all that there are: one of them ends a document.
        options = replace(options, vocab_size=null_vocab_size(vocab_size))
    tokenizer = build_tokenizer(options)
    if vocab_size is None:
        vocab_size = args.vocab_size = tokenizer.vocab_size
    if not only_ids and (masked or args.load is not None):
        check_fits(tokenizer, vocab_size)
    entries = vocab_size if masked else tokenizer.vocab_size
    if padded is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-entries // multiple) * multiple
    elif padded < entries:
        raise ConfigError(
            f"--padded-vocab-size {padded} is less than the {entries} entries of "
            "the vocabulary: raise it or leave it out"
        )
    return tokenizer


def check_files(args: argparse.Namespace) -> None:
    """Check that every data set exists, before any process group does.

    Raises:
        DataError: names the flag, the prefix and the file that is missing.
    """
    if args.data_args_path and not args.data_path:
        args.data_path = tuple(check_path(args.data_args_path, "input").read_text().split())
    _parts_as_paths(args)
    options = read(DataOptions, args)
    for name in ("data_path", *(f"{split}_data_path" for split in SPLITS)):
        paths = getattr(options, name)
        blend = get_blend_from_list(paths and list(paths))
        for prefix in blend[0] if blend else ():
            parts = part_prefixes(prefix) if options.is_instruction_dataset else [prefix]
            for file in (part + suffix for part in parts for suffix in (".idx", ".bin")):
                if not Path(file).is_file():
                    raise DataError(
                        f"--{name.replace('_', '-')} {prefix}: there is no file {file}; "
                        f"{_how_to_name(options)}"
                    )
                check_path(file, "input")


def _parts_as_paths(args: argparse.Namespace) -> None:
    """``--train-weighted-split-paths`` as ``--train-data-path`` with weights."""
    for split, parts in zip(SPLITS, weighted_parts(read(DataOptions, args)), strict=True):
        if parts is not None:
            words = [word for part in parts for word in (str(part.weight), part.prefix)]
            setattr(args, f"{split}_data_path", tuple(words))


def _how_to_name(options: DataOptions) -> str:
    if options.is_instruction_dataset:
        return (
            "give the --output-prefix of mindspeed preprocess --handler-name ..., or leave "
            "--is-instruction-dataset out for plain text"
        )
    return "give the path without .bin or .idx (mindspeed preprocess writes both)"
