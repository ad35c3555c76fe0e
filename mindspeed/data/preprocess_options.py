"""Options of ``mindspeed preprocess`` and their validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindspeed.data import handlers
from mindspeed.data.loss_mask import CONVERSATION_KEYS
from mindspeed.data.sources import TEXT_UNITS
from mindspeed.data.tokenizer_types import TokenizerOptions
from mindspeed.errors import ConfigError

_NOT_IN_FILE_NAMES = frozenset({"/", "\0"})


@dataclass(frozen=True)
class PreprocessOptions:
    """Input, tokenization and output of preprocessing.

    Attributes:
        inputs: files, folders, or the name of a Hugging Face data set.
        output_prefix: prefix of the names of the data sets.
        tokenizer: Megatron's tokenizer flags.
        json_keys: columns to tokenize, without a handler.
        append_eod: end every document with the end-of-text token.
        workers: number of worker processes.
        strict: stop at the first invalid record.
        overwrite: replace existing output.
        handler: name of :data:`mindspeed.data.handlers.HANDLERS`.
        map_keys: column names for the handler.
        prompt_type: chat template (default: the handler's).
        template_variables: values of variables of the tokenizer's chat template.
        train_on: which answers are trained.
        train_on_inputs: also train the prompts.
        label_boundary: ``exact``, or ``legacy`` (:mod:`mindspeed.data.loss_mask`).
        seq_length: maximum length of a sample, conversations only.
        max_samples: maximum number of records to read.
        resume: continue an interrupted run.
        hf_datasets_params: file with arguments of ``datasets.load_dataset``.
        streaming: stream that data set.
        text_unit: unit of a document in a ``.txt`` file, one of ``sources.TEXT_UNITS``.
        split_sentences: write one sequence per sentence.
        keep_newlines: keep the whitespace after each sentence.
    """

    inputs: tuple[Path, ...]
    output_prefix: Path
    tokenizer: TokenizerOptions
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    strict: bool = False
    overwrite: bool = False
    handler: str = ""
    map_keys: Mapping[str, Any] = field(default_factory=dict)
    prompt_type: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    train_on: Literal["all", "last"] = "all"
    train_on_inputs: bool = False
    label_boundary: Literal["exact", "legacy"] = "exact"
    seq_length: int | None = None
    max_samples: int | None = None
    resume: bool = False
    hf_datasets_params: Path | None = None
    streaming: bool = False
    text_unit: str = "line"
    split_sentences: bool = False
    keep_newlines: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the data sets, one each."""
        handler = handlers.find(self.handler)
        if handler.preferences is not None:
            return tuple(f"packed_{name}" for name in (*CONVERSATION_KEYS, "values"))
        if handler.conversations is not None:
            return tuple(f"packed_{name}" for name in CONVERSATION_KEYS)
        return self.json_keys if handler.text is None else ("text",)

    def output(self, key: str) -> Path:
        """Path of the data set of one key, without ``.bin`` or ``.idx``."""
        level = "sentence" if self.split_sentences else "document"
        return self.output_prefix.with_name(f"{self.output_prefix.name}_{key}_{level}")

    @property
    def state(self) -> Path:
        """State file from which an interrupted run continues."""
        return self.output_prefix.with_name(f".{self.output_prefix.name}.preprocess.json")


def check(options: PreprocessOptions) -> None:
    """Validate the options before work starts.

    Raises:
        ConfigError: the message names the flag and the allowed values, or the existing output.
    """
    if not options.output_prefix.name:
        raise ConfigError(
            f"--output-prefix {options.output_prefix}: a file name prefix is expected"
        )
    handler = handlers.find(options.handler)
    handler.with_keys(options.map_keys)
    if options.workers < 1:
        raise ConfigError(f"--workers {options.workers}: at least 1 is needed")
    for flag, value in (("seq-length", options.seq_length), ("max-samples", options.max_samples)):
        if value is not None and value < 1:
            raise ConfigError(f"--{flag} {value}: at least 1 is needed")
    if len(set(options.json_keys)) != len(options.json_keys) or not options.json_keys:
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)}: name every key once")
    for key in options.json_keys:
        if unfit := set(key) & _NOT_IN_FILE_NAMES:
            raise ConfigError(
                f"--json-keys {key}: a key becomes part of file names, which "
                f"cannot contain {' or '.join(map(repr, sorted(unfit)))}; rename the field"
            )
    if options.split_sentences and (handler.conversations or handler.preferences):
        raise ConfigError(
            f"--split-sentences is for texts: with --handler-name {options.handler} a sample is a "
            "whole conversation"
        )
    if options.keep_newlines and not options.split_sentences:
        raise ConfigError("--keep-newlines needs --split-sentences")
    if options.text_unit not in TEXT_UNITS:
        raise ConfigError(
            f"--txt-document {options.text_unit}: allowed are {', '.join(TEXT_UNITS)}"
        )
    if options.overwrite or (options.resume and options.state.exists()):
        return
    for key in options.keys:
        index = options.output(key).with_name(options.output(key).name + ".idx")
        if index.exists():
            raise ConfigError(f"{index} exists already; replace it with --overwrite")
