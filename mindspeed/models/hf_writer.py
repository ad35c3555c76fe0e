"""Writing Hugging Face weights tensor by tensor.

The sizes of all tensors are known before their contents, so each safetensors file gets its header
first and then one tensor after the other; memory holds one tensor at a time.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed.files import atomic_write_text, atomic_writer
from mindspeed.models.hf_files import DTYPE_NAMES, INDEXES, SINGLE_FILES
from mindspeed.models.table import Parameter
from mindspeed.models.weight_shards import source_rows


@dataclass(frozen=True)
class TensorSpec:
    """Name, type and shape of a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its contents."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def specs_of(parameter: Parameter, dtype: torch.dtype) -> Iterator[TensorSpec]:
    """The Hugging Face tensors that a parameter becomes."""
    rows = source_rows(parameter.segments)
    for name, count in rows.items():
        yield TensorSpec(name, dtype, (count, *parameter.shape[1:]))
    for copy in parameter.copies:
        yield TensorSpec(copy, dtype, (rows[parameter.sources[0]], *parameter.shape[1:]))


def write_weights(
    folder: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard_bytes: int,
) -> None:
    """Write safetensors files, and their index if they are several.

    Args:
        folder: An existing directory.
        specs: All tensors, in the order in which they come.
        tensors: Their names and contents, in this order; shapes ``[*spec.shape]`` and dtypes are
            those of their specs.
        max_shard_bytes: Largest size of a file that holds more than one tensor.
    """
    shards = _shards(specs, max_shard_bytes)
    names = [
        SINGLE_FILES[0] if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        for i in range(1, len(shards) + 1)
    ]
    source = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, source)
    if len(shards) > 1:
        weight_map = {
            spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard
        }
        total = sum(spec.nbytes for spec in specs)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        atomic_write_text(folder / INDEXES[0], json.dumps(index, indent=2, sort_keys=True))


def _shards(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def _write_file(
    path: Path, specs: Sequence[TensorSpec], source: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """One file: length of the header, the header as JSON, the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_writer(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for spec in specs:
            name, tensor = next(source)
            if (name, tensor.dtype, tuple(tensor.shape)) != (spec.name, spec.dtype, spec.shape):
                raise ValueError(f"{name} {tensor.dtype} {tuple(tensor.shape)} is not {spec}")
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
