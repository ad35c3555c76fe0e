"""Any format to any other: open, transform, write, verify, publish.

    source = open_weights("Qwen3-8B")
    convert(source, "checkpoints", Target("torch", ParallelSizes(tensor=4, pipeline=2)))

The source is checked before anything is written; the output is renamed to its final name when all
its bytes are on the disk.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from mindspeed.checkpoint.contents import DEEPSPEED_TRACKER, contents_of, refuse_adapter
from mindspeed.checkpoint.weights.hugging_face import HFWeights, family_like, write_hf
from mindspeed.checkpoint.weights.legacy import LegacyWeights, write_legacy
from mindspeed.checkpoint.weights.safetensors_files import SafetensorsWeights, write_safetensors
from mindspeed.checkpoint.weights.torch_dist import (
    TorchDistWeights,
    write_torch_dist,
)
from mindspeed.errors import CheckpointError, DamagedCheckpoint
from mindspeed.files import atomic_write_text, check_path, harden_tree, make_dirs
from mindspeed.flags import changed
from mindspeed.models.families import Family
from mindspeed.models.hf_files import CONFIG, read_config
from mindspeed.models.hf_load import folder_of
from mindspeed.models.naming import Scheme
from mindspeed.models.parallel_sizes import ParallelSizes
from mindspeed.models.weight_source import (
    TransformedWeights,
    WeightSource,
    padded_vocab,
    take_vocabulary,
)
from mindspeed.storage import directory
from mindspeed.storage.safe_metadata import common_state

Format = Literal["hf", "torch_dist", "torch", "deepspeed", "safetensors"]
FORMATS: tuple[Format, ...] = ("hf", "torch_dist", "torch", "deepspeed", "safetensors")


@dataclass(frozen=True)
class Target:
    """What to write.

    Attributes:
        format: Of the files.
        parallel: Parallel sizes that a legacy checkpoint has files for.
        transformer_impl: Layer spec of the Megatron model; None keeps the source's.
        grouped: For ``--moe-grouped-gemm``, in a legacy checkpoint.
        vocab_multiple: The vocabulary of each tensor-parallel rank is padded to a multiple of this;
            None keeps the source's padding if it fits.
        dtype: Type of the weights; None keeps theirs.
        added_tokens: Number of tokens to add; their embeddings are the mean of the others.
        like: Hugging Face directory whose other keys and tokenizer go with a Hugging Face model.
        max_file_bytes: Largest size of a file with more than one tensor; None takes the format's.
        progress: Show a bar.
    """

    format: Format
    parallel: ParallelSizes = field(default_factory=ParallelSizes)
    transformer_impl: Scheme | None = None
    grouped: bool = False
    vocab_multiple: int | None = None
    dtype: torch.dtype | None = None
    added_tokens: int = 0
    like: str | None = None
    max_file_bytes: int | None = None
    progress: bool = False


def open_weights(
    path: str | Path,
    *,
    step: int | None = None,
    like: str | None = None,
    mtp_num_layers: int | None = None,
) -> WeightSource:
    """The weights in a directory of any format.

    Args:
        path: Directory with a ``config.json`` (``hf:DIR``, too), directory of checkpoints, or one
            checkpoint.
        step: Iteration; None for the latest one.
        like: Hugging Face directory that says which family a Megatron model is of.
        mtp_num_layers: Layers of multi-token prediction to take from a Hugging Face directory; a
            checkpoint's own are always taken.

    Raises:
        CheckpointError: There are none, or they are incomplete.
        ConfigError: Megatron does not have this model.
    """
    found = contents_of(folder_of(str(path)), step)
    refuse_adapter(found, "--input or --load")
    if found.kind == "hf":
        return HFWeights(found.folder, mtp_num_layers=mtp_num_layers)

    def family(args: argparse.Namespace) -> Family:
        if like is not None:
            take_vocabulary(args, read_config(like).get("vocab_size"))
        return family_like(args, like)

    checkpoint = found.checkpoint
    if checkpoint is None:
        which = "" if step is None else f" of iteration {step}"
        raise CheckpointError(f"{found.folder} holds neither a checkpoint{which} nor a {CONFIG}")
    if found.has_whole_weights:
        problem = directory.damage_of(checkpoint, whole=True)
    else:
        problem = directory.problem_with(checkpoint)
    if problem is not None:
        raise DamagedCheckpoint(
            f"{checkpoint} cannot be read: {problem}{directory.others(checkpoint)}"
        )
    if found.kind == "legacy":
        known = HFWeights(like, mtp_num_layers=mtp_num_layers).args if like else None
        return LegacyWeights(checkpoint, known, family)
    if found.kind == "safetensors":
        return SafetensorsWeights(checkpoint, family)
    args = common_state(checkpoint)["args"]
    return TorchDistWeights(checkpoint, args, family(args))


def convert(source: WeightSource, output: str | Path, target: Target) -> WeightSource:
    """Write a model in another format.

    Returns:
        The source with all changes, as it was written.

    Raises:
        CheckpointError: ``output`` exists, or the source is incomplete.
        ConfigError: The model cannot be divided like this.
    """
    total = sum(source.nbytes(parameter) for parameter in source.table)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc=target.format, disable=not target.progress
    ) as bar:
        weights = _transformed(source, target, bar.update)
        with _published(Path(output), target.format) as folder:
            _write(weights, folder, target)
    return weights


def verify(written: WeightSource, output: str | Path, *, like: str | None = None) -> int:
    """Read an output and compare every parameter with its source, byte for byte.

    Args:
        written: As :func:`convert` returns it.
        output: What it wrote.
        like: As in :func:`open_weights`.

    Returns:
        The number of parameters.

    Raises:
        CheckpointError: Names the first parameter that differs.
    """
    mtp = written.shape["mtp"] or None
    found = open_weights(output, like=like, mtp_num_layers=mtp)
    rows = {parameter.name: parameter.shape[0] for parameter in found.table}
    for parameter in written.table:
        if parameter.name not in rows:
            raise CheckpointError(f"{output}: there is no {parameter.name}")
    for parameter, original in zip(found.table, written.table, strict=True):
        # A Hugging Face directory has no padding.
        theirs = written.read(original)[: parameter.shape[0]]
        if not _same_bytes(found.read(parameter), theirs):
            raise CheckpointError(f"{output}: {parameter.name} is not what was written")
    return len(found.table)


def _same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    raw = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[ours.element_size()]
    return same and torch.equal(ours.contiguous().view(raw), theirs.contiguous().view(raw))


def _transformed(
    source: WeightSource, target: Target, on_read: Callable[[int], object]
) -> WeightSource:
    """The source with the dtype, vocabulary and layer spec of the target."""
    padded = padded_vocab(
        source, target.added_tokens, target.vocab_multiple, target.parallel.tensor
    )
    weights = TransformedWeights(
        source,
        dtype=target.dtype,
        added_tokens=target.added_tokens,
        padded_vocab=padded,
        on_read=on_read,
    )
    dtype = weights.dtype(weights.table[0])
    weights.args = changed(
        weights.args,
        transformer_impl=target.transformer_impl or weights.scheme,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
    )
    return weights


def _write(weights: WeightSource, folder: Path, target: Target) -> None:
    limit = target.max_file_bytes
    if target.format == "hf":
        write_hf(weights, folder, like=target.like, max_shard_bytes=limit or 5_000_000_000)
    elif target.format == "safetensors":
        write_safetensors(weights, folder, max_shard_bytes=limit or 5_000_000_000)
    elif target.format == "torch_dist":
        write_torch_dist(weights, folder, max_file_bytes=limit or 1 << 30)
    else:
        deepspeed = target.format == "deepspeed"
        write_legacy(weights, folder, target.parallel, grouped=target.grouped, deepspeed=deepspeed)


@contextmanager
def _published(output: Path, format_: Format) -> Iterator[Path]:
    """A folder for files that appear under their name whole or not at all."""
    final = output
    if format_ == "hf":
        if output.exists():
            raise CheckpointError(f"{output} exists; give a new directory")
    else:
        final = output / directory.RELEASE
        if final.exists() or directory.tracked(output) is not None:
            raise CheckpointError(f"{output} holds checkpoints already; give a new directory")
    made = [p for p in (output, *output.parents) if not p.exists()]
    unfinished = final.with_name(final.name + ".tmp")
    check_path(unfinished, "output")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield make_dirs(unfinished)
        if format_ != "hf":
            directory.add_digests(unfinished)
        harden_tree(unfinished)
        unfinished.rename(final)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        if isinstance(error, OSError) and error.strerror and error.filename is None:
            raise OSError(error.errno, error.strerror, str(output)) from error
        raise
    if format_ != "hf":
        atomic_write_text(output / directory.TRACKER, directory.RELEASE)
    if format_ == "deepspeed":
        atomic_write_text(output / DEEPSPEED_TRACKER, directory.RELEASE)
