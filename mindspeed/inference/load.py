"""A trained model ready to generate, from a checkpoint of any layout.

The shape of the model, its precision and its tokenizer come from the checkpoint; tensor and
pipeline size are free, because the files are resharded while they are read. Only weights are
loaded. Sequence parallelism and virtual stages play no role in generation and are left off.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from mindspeed.checkpoint.load import load, saved_args, take_architecture
from mindspeed.data.tokenizer import TextTokenizer, TokenizerOptions, build_tokenizer
from mindspeed.errors import ConfigError
from mindspeed.training import setup
from mindspeed.training.arguments import parse
from mindspeed.training.configs import transformer_config
from mindspeed.training.model import BuiltModel, build_modules, gpt_model
from mindspeed.training.resolve import resolve


@dataclass(frozen=True)
class LoadedModel:
    """This rank's stage and what belongs to it."""

    stage: Any
    tokenizer: TextTokenizer
    args: argparse.Namespace


@dataclass(frozen=True)
class Source:
    """Which checkpoint, on how many ranks.

    Attributes:
        root: Directory of checkpoints (``--save`` of the training).
        step: Iteration; None for the latest.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        tokenizer: Overrides the tokenizer of the checkpoint where a field is set.
    """

    root: str
    step: int | None = None
    tp: int = 1
    pp: int = 1
    tokenizer: str | None = None


def resolve_source(source: Source, world_size: int) -> argparse.Namespace:
    """Final values of a model from a checkpoint; reads one small file, makes no process group.

    Raises:
        CheckpointError: There is no good checkpoint.
        ConfigError: The model cannot be cut as asked.
    """
    saved = saved_args(source.root, source.step)
    words = ["--load", source.root, "--finetune", "--no-load-rng", "--exit-on-missing-checkpoint"]
    words += ["--tensor-model-parallel-size", str(source.tp)]
    words += ["--pipeline-model-parallel-size", str(source.pp)]
    words += ["--ckpt-step", str(source.step)] if source.step is not None else []
    args = parse(words)
    take_architecture(args, saved)
    for name in ("bf16", "fp16", "transformer_impl", "padded_vocab_size"):
        if hasattr(saved, name):
            setattr(args, name, getattr(saved, name))
    if source.tokenizer is not None:
        args.tokenizer_model = source.tokenizer
    vocab = args.padded_vocab_size
    if vocab is not None and vocab % source.tp:
        raise ConfigError(
            f"the checkpoint's vocabulary of {vocab} rows cannot be divided by "
            f"--tensor-model-parallel-size {source.tp}"
        )
    return resolve(args, world_size, training=False).args


def load_model(source: Source, world_size: int) -> LoadedModel:
    """Build and load this rank's stage. Collective."""
    args = resolve_source(source, world_size)
    setup.initialize(args)
    tokenizer = build_tokenizer(TokenizerOptions.from_args(args))
    config = transformer_config(args)
    model = BuiltModel(config, build_modules(args, config, gpt_model))
    load(args, model)
    return LoadedModel(model.modules[0].eval(), tokenizer, args)
