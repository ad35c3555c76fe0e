"""``--data``: raw files become data sets before a run, once.

    mindspeed finetune --load hf:models/qwen3-8b --data chat.jsonl --lora-r 16
    mindspeed pretrain --model qwen3-0.6b --data text.parquet --seq-length 4096 --lr 3e-4 ...

Files are tokenized into ``--data-cache-path``, or into ``~/.cache/mindspeed``, below a name that is
the digest of the file, the tokenizer and the options: a second run, the other ranks of a job and
other layouts find them there. An interrupted tokenization is continued.

Flags that the user has not set follow from the data and the model: see :func:`use_raw_data`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.utils import get_blend_from_list
from rich.console import Console

from mindspeed.checkpoint.options import CheckpointOptions
from mindspeed.data import handlers, packing
from mindspeed.data.hf_template import has_template
from mindspeed.data.instruction_dataset import InstructionFiles
from mindspeed.data.preference_dataset import PARTS, PreferenceFiles
from mindspeed.data.preprocess import PreprocessReport, Progress, digest_of
from mindspeed.data.preprocess_options import PreprocessOptions
from mindspeed.data.preprocess_report import (
    preprocess_with_bar,
    print_remarks,
    print_report,
    print_samples,
    say,
)
from mindspeed.data.record_encoders import first_record
from mindspeed.data.sources import find_files
from mindspeed.data.tokenizer import build_tokenizer
from mindspeed.data.tokenizer_types import HUGGINGFACE_TYPES, TokenizerOptions
from mindspeed.errors import ConfigError, DataError
from mindspeed.files import atomic_write_text, make_dirs, secure_open
from mindspeed.flags import changed, read
from mindspeed.models.hf_files import read_config
from mindspeed.models.hf_load import folder_of, is_hf
from mindspeed.parsing import parse_object, read_json
from mindspeed.preference.options import PreferenceOptions
from mindspeed.processes import cores
from mindspeed.storage.directory import tracked
from mindspeed.training.data import rows_of_a_sample
from mindspeed.training.fail_together import LAUNCHER
from mindspeed.training.options import DataOptions, LoraOptions, ModelOptions, TrainingOptions
from mindspeed.training.resolve_parallel import model_parallel_size, parts_of_a_sequence

LONGEST = 4096
"""Tokens of a sample at most, where neither ``--seq-length`` nor the model says less."""
MULTIPLE = 64
"""``--seq-length`` is a multiple of this."""
SEQUENCES_OF_A_STEP = 16
STEPS_OF_AN_EPOCH = 8
"""Small data have shorter sequences, and fewer in a step, so that an epoch has so many steps."""
SHOWN = 3
"""Samples that are printed before training."""
_BYTES_OF_A_WORKER = 4 << 20  # less is tokenized before a process has started
_ONLY_CONVERSATIONS = ("epochs", "prompt_type", "chat_template_kwargs", "train_on")
_ONLY_WITH_DATA = ("eval_data", "handler_name", "map_keys", *_ONLY_CONVERSATIONS)
_OTHER_SOURCES = ("data_path", "train_data_path", "valid_data_path", "data_args_path", "mock_data")


@dataclass(frozen=True)
class TokenizedFile:
    """A file of ``--data``.

    Attributes:
        name: as the user has named it.
        prefix: of its data set, as in ``--data-path``.
        weight: its part of the samples; None: as much as it has.
    """

    name: str
    prefix: str
    weight: float | None


class _Flags:
    """Flags of a run, of which those that the user has not set can be assumed.

    Attributes:
        args: their values, a copy with those that were changed.
        assumed: words of those that were.
    """

    def __init__(self, args: argparse.Namespace, given: Collection[str]) -> None:
        self.args, self._given = args, given
        self.assumed: list[str] = []

    def change(self, **values: Any) -> None:
        """Set values."""
        self.args = changed(self.args, **values)

    def free(self, *names: str) -> bool:
        """Whether the user has set none of these."""
        return not any(name in self._given for name in names)

    def assume(self, **values: Any) -> None:
        """Set values; each is left alone if the user has set it."""
        for name, value in values.items():
            if self.free(name):
                self.change(**{name: value})
                shown = "" if value is True else f" {value}"
                self.assumed.append(f"--{name.replace('_', '-')}{shown}")


def use_raw_data(
    args: argparse.Namespace, given: Collection[str], ranks: int, *, dry_run: bool
) -> tuple[argparse.Namespace, set[str]]:
    """Tokenize the files of ``--data`` and ``--eval-data``, for the flags that follow from them.

    For conversations, unless they are given: ``--seq-length`` of the longest sample or of packed
    sequences, at most the model's and :data:`LONGEST`; ``--pack-sequences``; a global batch of
    about :data:`SEQUENCES_OF_A_STEP` sequences; ``--train-iters`` of ``--epochs``; ``--lr``; the
    dtype of the model's folder; recomputation; a directory to save to.

    Args:
        args: parsed flags.
        given: names of the flags that the user has set.
        ranks: size of the job.
        dry_run: nothing will be saved.

    Returns:
        The flags, completed, and the names of those that ``--data`` and ``--epochs`` stand for in
        a recipe of the run.

    Raises:
        ConfigError: a flag contradicts ``--data``, or is only for it.
        DataError: a file cannot be read, or has records of no known format.
    """
    flags, options = _Flags(args, given), read(DataOptions, args)
    conversations = options.is_instruction_dataset
    if not options.data:
        if wrong := [name for name in _ONLY_WITH_DATA if name in given]:
            raise ConfigError(f"{_words(wrong)}: only with --data")
        return args, set()
    if wrong := [name for name in _OTHER_SOURCES if name in given]:
        raise ConfigError(f"give --data, or {_words(wrong)}")
    wrong = [name for name in _ONLY_CONVERSATIONS if name in given]
    if wrong and not conversations:
        raise ConfigError(f"{_words(wrong)}: only for conversations (mindspeed finetune)")
    console = Console(stderr=True, quiet="RANK" in os.environ and not _speaks())
    # Before the progress bar: a tokenizer that cannot be read is an error of its own.
    tokenizer = None if console.quiet else build_tokenizer(TokenizerOptions.from_args(args))
    if conversations:
        _assume_directory(flags, options.data[-1], dry_run)
        flags.assume(pack_sequences=not (options.variable_seq_lengths or options.length_grouped))
    train = _tokenized(flags.args, options.data, "--data", console)
    held_out = _tokenized(flags.args, options.eval_data or (), "--eval-data", console)
    if held_out:
        flags.change(train_data_path=_blend(train), valid_data_path=_blend(held_out))
    else:
        flags.change(data_path=_blend(train))
        flags.assume(split="100,0,0")
    if conversations:
        _follow_conversations(flags, train, held_out, ranks)
        if tokenizer is not None:
            files = InstructionFiles(train[0].prefix)
            parts = () if _objective(args) == "next_token" else PARTS
            shown = range(min(SHOWN * max(1, len(parts)), len(files)))
            print_samples([files[i] for i in shown], tokenizer, console, parts=parts)
    if flags.assumed:
        say(console, f"not given, so assumed: {' '.join(flags.assumed)}")
    return flags.args, {*_OTHER_SOURCES, *(() if "train_iters" in given else ("train_iters",))}


def _objective(args: argparse.Namespace) -> str:
    return read(PreferenceOptions, args).objective


def _speaks() -> bool:
    """Whether this rank prints what is done: a launcher of ours has done and said it."""
    return os.environ["RANK"] == "0" and LAUNCHER not in os.environ


def _words(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _blend(files: Sequence[TokenizedFile]) -> tuple[str, ...]:
    """The files as a value of ``--data-path``."""
    return tuple(
        word
        for one in files
        for word in (() if one.weight is None else (str(one.weight),)) + (one.prefix,)
    )


def _tokenized(
    args: argparse.Namespace, words: Sequence[str], flag: str, console: Console
) -> list[TokenizedFile]:
    """The data sets of files, or of weights and files."""
    if not words:
        return []
    try:
        paths, weights = get_blend_from_list(list(words))
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"{flag} {' '.join(words)}: files, or a weight before each") from error
    return [
        TokenizedFile(path, tokenize_file(args, Path(path), flag, console), weight)
        for path, weight in zip(paths, weights or [None] * len(paths), strict=True)
    ]


def tokenize_file(args: argparse.Namespace, path: Path, flag: str, console: Console) -> str:
    """Tokenize a file, or find that it has been.

    Args:
        args: flags of the tokenizer, of ``--data`` and ``--seq-length``.
        path: of the file, or of a folder of files.
        flag: that names it, for messages.
        console: of the progress bar, and of what is said about the data.

    Returns:
        The prefix of its data set.
    """
    options, data = _options(args, path, flag), read(DataOptions, args)
    folder = _cache(data.data_cache_path) / digest_of(options)[:20]
    prefix = folder / "tokens"
    options = dataclasses.replace(options, output_prefix=prefix, resume=True, overwrite=True)
    make_dirs(folder)
    with _alone(folder):
        if not (folder / "report.json").exists():
            report = preprocess_with_bar(options, console)
            found = dataclasses.asdict(report.totals) | {"notes": report.notes}
            print_report(report, console)
            atomic_write_text(folder / "report.json", json.dumps(found))
        else:
            found = read_json(folder / "report.json", str(folder / "report.json"), DataError)
            notes = tuple(found.pop("notes"))
            known = PreprocessReport((prefix,), 0, Progress.from_json(found), notes)
            say(console, f"{path}: tokenized before, {known.totals.documents:,} documents")
            print_remarks(known, console)
    return str(prefix if data.is_instruction_dataset else options.output(options.keys[0]))


def _cache(given: str | None) -> Path:
    """Directory in which tokens are kept, ``--data-cache-path`` if that is given."""
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mindspeed"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other rank or run tokenizes into a directory."""
    with secure_open(folder / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _options(args: argparse.Namespace, path: Path, flag: str) -> PreprocessOptions:
    """How a file is tokenized; its format follows from its first record."""
    tokenizer, objective = TokenizerOptions.from_args(args), _objective(args)
    data = read(DataOptions, args)
    source = find_files([path], flag=flag)
    handler, keys = data.handler_name, parse_object(data.map_keys, "--map-keys")
    workers = max(1, min(cores(), source.size // _BYTES_OF_A_WORKER))
    options = PreprocessOptions((path,), Path(path.name), tokenizer, workers=workers)
    record = first_record(source.blocks())
    if record is None:
        raise DataError(f"{flag} {path}: there is no record in it")
    try:
        if not data.is_instruction_dataset:
            columns = ("text",) if handler else (handlers.text_column(record),)
            return dataclasses.replace(
                options, json_keys=columns, append_eod=True, handler=handler, map_keys=keys
            )
        if not handler and objective != "next_token":
            preferences = objective == "preference"
            judged = preferences and read(PreferenceOptions, args).loss_type == "kto"
            handler = "UnpairedPreferenceHandler" if judged else "PreferenceHandler"
        if not handler:
            handler, found = handlers.of_record(record)
            keys = found | keys
    except ValueError as error:
        raise DataError(f"{flag} {path}: {error}") from error
    reader = handlers.find(handler)
    if objective != "next_token" and reader.preferences is None:
        raise ConfigError(f"--handler-name {handler} reads no pairs of answers")
    if objective == "next_token" and reader.conversations is None:
        what = "texts, not conversations" if reader.preferences is None else "pairs: mindspeed dpo"
        raise ConfigError(f"--handler-name {handler} reads {what}")
    return dataclasses.replace(
        options,
        handler=handler,
        map_keys=keys,
        prompt_type=data.prompt_type or _own_template(tokenizer),
        template_variables=parse_object(data.chat_template_kwargs, "--chat-template-kwargs"),
        train_on=data.train_on,
        # The reward of an answer without its end is none: the data set leaves long pairs out.
        seq_length=None if objective == "reward" else _longest(args),
    )


def _own_template(tokenizer: TokenizerOptions) -> str | None:
    """``hf`` where the tokenizer has a chat template; None: that of the records' format."""
    own = tokenizer.tokenizer_type in HUGGINGFACE_TYPES and tokenizer.tokenizer_model
    return "hf" if own and has_template(Path(own)) else None


def _longest(args: argparse.Namespace) -> int:
    """Tokens of the longest sample that is kept whole."""
    longest = read(ModelOptions, args).max_position_embeddings or LONGEST
    return int(read(DataOptions, args).seq_length or min(LONGEST, longest))


def _follow_conversations(
    flags: _Flags,
    train: Sequence[TokenizedFile],
    held_out: Sequence[TokenizedFile],
    ranks: int,
) -> None:
    """Set sizes, duration, learning rate and memory of a fine-tuning."""
    data, training = read(DataOptions, flags.args), read(TrainingOptions, flags.args)
    micro = max(rows_of_a_sample(flags.args), training.micro_batch_size)
    flags.assume(micro_batch_size=micro)
    lengths = _lengths(flags.args, train)
    multiple = math.lcm(MULTIPLE, parts_of_a_sequence(flags.args))
    fewest = lengths.sum() // (SEQUENCES_OF_A_STEP * STEPS_OF_AN_EPOCH)
    needed = int(max(lengths.max(), fewest) if data.pack_sequences else lengths.max())
    flags.assume(seq_length=min(_longest(flags.args), packing.rounded_up(needed, multiple)))
    sequences = _sequences(lengths, flags.args)
    training = read(TrainingOptions, flags.args)
    part = max(1, ranks // model_parallel_size(flags.args)) * training.micro_batch_size
    if flags.free("gradient_accumulation_steps", "rampup_batch_size"):
        wanted = min(SEQUENCES_OF_A_STEP, sequences // STEPS_OF_AN_EPOCH)
        flags.assume(global_batch_size=max(1, wanted // part) * part)
    training = read(TrainingOptions, flags.args)
    batch = training.global_batch_size or part * (training.gradient_accumulation_steps or 1)
    if flags.free("train_samples"):
        flags.assume(train_iters=max(1, math.ceil(data.epochs * sequences / batch)))
    elif not flags.free("epochs"):
        raise ConfigError("give one of --epochs and --train-samples")
    if not flags.free("train_iters") and not flags.free("epochs"):
        raise ConfigError("give one of --epochs and --train-iters")
    if held_out:
        evaluated = _sequences(_lengths(flags.args, held_out), flags.args)
        steps = read(TrainingOptions, flags.args).train_iters or 1
        flags.assume(eval_iters=max(1, evaluated // batch), eval_interval=max(1, steps // 10))
    options = read(LoraOptions, flags.args)
    adapters = bool(options.lora_target_modules or options.lora_load)
    lr = (1e-4, 1e-5) if adapters else (1e-5, 1e-6)
    flags.assume(lr=lr[_objective(flags.args) == "preference"])
    if flags.free("lr_warmup_iters", "lr_warmup_samples"):
        flags.assume(lr_warmup_fraction=0.03)
    load = read(CheckpointOptions, flags.args).load
    if load is not None and is_hf(load) and flags.free("fp16", "bf16"):
        config = read_config(Path(folder_of(load)))
        if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")):  # by its age
            flags.assume(bf16=True)
    if flags.free("recompute_granularity"):
        flags.assume(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )


def _assume_directory(flags: _Flags, file: str, dry_run: bool) -> None:
    """Save to a directory that is called after the model and the data."""
    options = read(CheckpointOptions, flags.args)
    model, data = Path(folder_of(options.load or "model")).name, Path(file).name
    save = f"{model}-{data.partition('.')[0]}"
    resumed = options.auto_resume or dry_run
    if flags.free("save") and tracked(save) is not None and not resumed:
        raise ConfigError(
            f"{save} has a trained model already: name another directory with --save, or go on "
            "with --auto-resume"
        )
    flags.assume(save=save)


def _lengths(args: argparse.Namespace, files: Sequence[TokenizedFile]) -> np.ndarray:
    """Tokens of every sample that is trained, int ``[samples]``; of a pair in one sequence."""
    objective = _objective(args)
    if objective == "next_token":
        lengths = np.concatenate([InstructionFiles(one.prefix).lengths for one in files]) - 1
        return lengths[lengths > 0]
    pairs = np.concatenate([PreferenceFiles(one.prefix).pair_lengths for one in files]) - 1
    pairs += objective == "reward"  # whose last token is an input, too
    return pairs.sum(axis=1) if read(DataOptions, args).pack_sequences else pairs.max(axis=1)


def _sequences(lengths: np.ndarray, args: argparse.Namespace) -> int:
    """Sequences of an epoch."""
    data = read(DataOptions, args)
    if not data.pack_sequences:
        return len(lengths) * rows_of_a_sample(args)
    assert data.seq_length is not None  # assumed, if not given
    return packing.count(lengths, data.seq_length)
