"""Hugging Face directories to ``torch_dist`` checkpoints and back, in one call each.

(:mod:`mindspeed.checkpoint.weights` has all formats; ``--load hf:DIR``, straight into a model, is
:mod:`mindspeed.models.hf_load`.)
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from mindspeed.checkpoint.weights import convert as formats
from mindspeed.checkpoint.weights.hugging_face import HFWeights, family_like
from mindspeed.checkpoint.weights.hugging_face import args_of as args_of
from mindspeed.checkpoint.weights.torch_dist import TorchDistWeights
from mindspeed.models.families import Family
from mindspeed.models.naming import Scheme


@dataclass(frozen=True)
class Target:
    """What a converted checkpoint is for.

    Attributes:
        transformer_impl: Layer spec of the model; models with experts have other keys in each.
        vocab_multiple: The vocabulary is padded to a multiple of this.
        dtype: Type of the weights; None keeps the files'.
        max_file_bytes: Largest size of a file with more than one tensor.
    """

    transformer_impl: Scheme = "transformer_engine"
    vocab_multiple: int = 128
    dtype: torch.dtype | None = None
    max_file_bytes: int = 1 << 30


def import_hf(folder: str, output: str, target: Target | None = None) -> list[str]:
    """Write a directory as a ``torch_dist`` checkpoint ``release`` that any layout loads.

    Args:
        folder: Hugging Face directory.
        output: Directory of checkpoints; must not hold a release yet.
        target: What it is for.

    Returns:
        Names of tensors in the files that the model does not use.

    Raises:
        CheckpointError: A tensor is missing or has another shape than ``config.json`` says.
    """
    target = target or Target()
    wanted = formats.Target(
        "torch_dist",
        transformer_impl=target.transformer_impl,
        vocab_multiple=target.vocab_multiple,
        dtype=target.dtype,
        max_file_bytes=target.max_file_bytes,
    )
    return formats.convert(HFWeights(folder), output, wanted).unused


def export_hf(
    checkpoint: Path,
    args: argparse.Namespace,
    output: str,
    *,
    like: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> Family:
    """Write a ``torch_dist`` checkpoint as a directory that transformers loads.

    Args:
        checkpoint: Directory of one iteration.
        args: The values stored in it.
        output: New directory.
        like: Directory whose ``config.json`` (keys that are not about the shape), tokenizer and
            generation settings go with the model.
        dtype: Type of the weights; None keeps the checkpoint's.
        max_shard_bytes: Largest size of a file with more than one tensor.

    Returns:
        The family it was written as.

    Raises:
        CheckpointError: A tensor is missing, or ``output`` exists.
        ConfigError: No family is like this model.
    """
    source = TorchDistWeights(checkpoint, args, family_like(args, like))
    target = formats.Target("hf", like=like, dtype=dtype, max_file_bytes=max_shard_bytes)
    return formats.convert(source, output, target).family
