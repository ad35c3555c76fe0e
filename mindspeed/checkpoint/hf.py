"""Hugging Face directories as a source and a target of checkpoints.

    directory -> torch_dist     :func:`import_hf`   (mindspeed convert)
    torch_dist -> directory     :func:`export_hf`   (mindspeed export)

(``--load hf:DIR``, straight into a model, is :mod:`mindspeed.models.hf_load`.)

Converting needs no accelerator, no process group and no model: the mapping table of the family says
where every row goes, and one tensor after the other is read and written.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed.checkpoint import directory
from mindspeed.checkpoint.global_tensors import GlobalTensors, StoredTensor, write_tensors
from mindspeed.checkpoint.state import stored_args
from mindspeed.errors import CheckpointError
from mindspeed.files import atomic_write_text, atomic_writer, harden_tree, make_dirs
from mindspeed.models.families import Family, family_of_args, family_of_config
from mindspeed.models.hf_files import (
    CONFIG,
    HFReader,
    TensorSpec,
    read_config,
    specs_of,
    write_weights,
)
from mindspeed.models.naming import Scheme, address, addresses
from mindspeed.models.rows import split
from mindspeed.models.shape import Shape, shape_of
from mindspeed.models.table import Parameter, parameters

# What belongs to a model beside its weights; copied as it is.
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


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


def args_of(folder: str, target: Target | None = None) -> argparse.Namespace:
    """Final values of a model as its directory describes it, on one rank.

    Raises:
        ConfigError: ``config.json`` is missing or asks for what Megatron has not.
    """
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.recipe import flag_words
    from mindspeed.training.resolve import resolve

    target = target or Target()
    flags = family_of_config(config := read_config(folder)).read(config)
    parser = build_parser()
    words = [*flag_words(flags, parser), f"--seq-length={flags['max_position_embeddings']}"]
    words += ["--lr=1", "--train-iters=1", "--eval-iters=0", "--mock-data"]  # no part of a model
    words += ["--transformer-impl", target.transformer_impl]
    has_tokenizer = any((Path(folder) / name).is_file() for name in _COMPANIONS[:3])
    if has_tokenizer:
        words += ["--tokenizer-type=HuggingFaceTokenizer"]
        words += [f"--tokenizer-model={Path(folder).resolve()}"]
    else:
        words += ["--tokenizer-type=NullTokenizer"]
    args = resolve(parser.parse_args(words), 1).args
    args.padded_vocab_size = -(-args.vocab_size // target.vocab_multiple) * target.vocab_multiple
    return args


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
    args = args_of(folder, target)
    family = family_of_config(read_config(folder))
    shape = shape_of(args)
    reader = HFReader(folder, family.prefixes)
    table = list(parameters(family.rules, shape))
    for parameter in table:  # everything that is wrong is said before anything is written
        reader.check(parameter)
    stacked = not isinstance(args.moe_layer_freq, list)
    places = [
        address(p, target.transformer_impl, shape.num_layers, shape["experts"], stacked=stacked)
        for p in table
    ]
    tensors = [
        StoredTensor(
            place.key,
            place.position,
            place.counts,
            parameter.shape,
            target.dtype or reader.dtype(parameter.sources[0]),
            lambda parameter=parameter: reader.read(parameter, dtype=target.dtype),  # type: ignore[misc]
        )
        for parameter, place in zip(table, places, strict=True)
    ]
    args.params_dtype = tensors[0].dtype
    args.bf16, args.fp16 = (args.params_dtype == t for t in (torch.bfloat16, torch.float16))
    with _release(output) as unfinished:
        write_tensors(unfinished, tensors, _extra_states(tensors), target.max_file_bytes)
        _write_common(unfinished, args)
    return reader.surplus(table)


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
    base = read_config(like) if like else {}
    family = family_of_config(base) if base else family_of_args(args)
    shape = shape_of(args)
    tensors = GlobalTensors(checkpoint)
    found = [(p, _find(tensors, p, shape, checkpoint)) for p in parameters(family.rules, shape)]
    specs: list[TensorSpec] = []
    for parameter, (key, _) in found:
        specs += specs_of(parameter, dtype or tensors.dtype(key))

    def contents() -> Iterator[tuple[str, torch.Tensor]]:
        for parameter, (key, position) in found:
            tensor = tensors.read(key, position)
            tensor = tensor if dtype is None else tensor.to(dtype)
            yield from split(tensor, parameter.segments).items()

    config = {**base, **family.write(args)}
    if base:
        config |= {k: base[k] for k in ("architectures", "model_type") if k in base}
    config["torch_dtype"] = _DTYPES[specs[0].dtype]
    final = Path(output)
    if final.exists():
        raise CheckpointError(f"{output} exists; give a new directory")
    unfinished = make_dirs(final.with_name(final.name + ".tmp"))
    try:
        write_weights(unfinished, specs, contents(), max_shard_bytes)
        atomic_write_text(unfinished / CONFIG, json.dumps(config, indent=2) + "\n")
        _copy_companions(like or getattr(args, "tokenizer_model", None), unfinished)
        harden_tree(unfinished)
        unfinished.rename(final)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return family


def _find(
    tensors: GlobalTensors, parameter: Parameter, shape: Shape, checkpoint: Path
) -> tuple[str, tuple[int, ...]]:
    """Where a checkpoint has a parameter."""
    for place in addresses(parameter, shape.num_layers, shape["experts"]):
        if place.key in tensors:
            expected = (*place.counts, *parameter.shape)
            if (stored := tensors.shape(place.key)) != expected:
                raise CheckpointError(
                    f"{checkpoint}: {place.key} has shape {list(stored)}, but the values stored "
                    f"with it make it {list(expected)}"
                )
            return place.key, place.position
    raise CheckpointError(f"{checkpoint}: there is no tensor for {parameter.name}")


def _copy_companions(source: str | None, target: Path) -> None:
    if source is None:
        return
    for name in _COMPANIONS:
        path = Path(source) / name
        if path.is_file():
            shutil.copyfile(path, target / name)


def _extra_states(tensors: Sequence[StoredTensor]) -> Iterator[str]:
    """Keys of the (empty) extra state of every module with a weight of its own."""
    for tensor in tensors:
        module, _, kind = tensor.key.rpartition(".")
        if kind == "weight" and module.startswith("decoder.") and not module.endswith("router"):
            position = ".".join(map(str, tensor.position or (0,)))
            counts = ".".join(map(str, tensor.counts or (1,)))
            yield f"{module}._extra_state/shard_{position}_{counts}"


class _release:
    """``with _release(output) as folder``: a checkpoint that appears whole or not at all."""

    def __init__(self, output: str) -> None:
        self._root = Path(output)
        self._folder = self._root / f"{directory.RELEASE}.tmp"

    def __enter__(self) -> Path:
        release = self._root / directory.RELEASE
        if release.exists() or directory.tracked(self._root) is not None:
            raise CheckpointError(f"{self._root} holds checkpoints already; give a new directory")
        shutil.rmtree(self._folder, ignore_errors=True)
        return make_dirs(self._folder)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        harden_tree(self._folder)
        self._folder.rename(self._root / directory.RELEASE)
        atomic_write_text(self._root / directory.TRACKER, directory.RELEASE)


def _write_common(folder: Path, args: argparse.Namespace) -> None:
    """The files beside the tensors: values of the model, and what format this is."""
    from mindspeed.checkpoint.state import sharding_metadata

    common = {
        "args": stored_args(args),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": sharding_metadata(args),
    }
    with atomic_writer(folder / "common.pt", "wb") as file:
        torch.save(common, file)
    description = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    atomic_write_text(folder / "metadata.json", json.dumps(description))
