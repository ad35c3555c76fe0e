"""Directories of Hugging Face weights: read what is needed, write tensor by tensor.

Reading: safetensors with or without an index, or ``pytorch_model*.bin``. A tensor is read row range
by row range from mapped files, so a reader holds only what it returns.

Writing: the sizes of all tensors are known before their contents, so each file gets its header
first and then one tensor after the other; memory holds one tensor at a time.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mindspeed.errors import CheckpointError, ConfigError, SecurityError
from mindspeed.files import atomic_write_text, atomic_writer, check_path
from mindspeed.json_fields import TEXT, MapOf, check, read_object
from mindspeed.models.finite import check_finite
from mindspeed.models.shape import CONFIG_KEYS
from mindspeed.models.table import Parameter
from mindspeed.models.weight_shards import overlap, source_rows
from mindspeed.security import safe_torch_load
from mindspeed.unpickle import check_relative

CONFIG = "config.json"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin")
# Buffers that old versions of transformers saved; they are computed, not learned.
_COMPUTED = (
    ".rotary_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".attn.masked_bias",
    ".attn.bias",
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ROWS = 4096  # of a tensor that is compared piece by piece
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


def read_config(folder: str | Path) -> dict[str, Any]:
    """``config.json`` of a directory.

    Raises:
        ConfigError: There is none, or it is no JSON object.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder} is no Hugging Face model: there is no {CONFIG}")
    config = read_object(path, ConfigError)
    if config.get("quantization_config"):
        raise ConfigError(
            f"{path}: the weights are quantized (quantization_config); convert them to bf16 first"
        )
    return config


def check_mtp(there: int, wanted: int | None, folder: str | Path) -> None:
    """See that a directory has so many layers of multi-token prediction.

    Raises:
        CheckpointError: It has fewer.
    """
    if (wanted or 0) > there:
        raise CheckpointError(
            f"--mtp-num-layers {wanted}: {folder} has {there} layers of multi-token prediction "
            f"(num_nextn_predict_layers in {CONFIG}); give at most {there}, or leave the flag out"
        )


class HFReader:
    """The tensors of one directory.

    Args:
        folder: Directory with ``config.json`` and weights.
        prefixes: Prefixes that names may lack in these files.

    Raises:
        CheckpointError: There are no weights, or a file of the index is missing.
        SecurityError: The index names a file outside the directory.
    """

    def __init__(self, folder: str | Path, prefixes: Sequence[str] = ()) -> None:
        self.folder = Path(folder)
        self._prefixes = prefixes
        self._open: dict[str, Any] = {}
        self._file_of = self._index()

    def __contains__(self, name: str) -> bool:
        return self._stored(name) is not None

    def surplus(
        self, parameters: Iterable[Parameter], further_layers: int | None = None
    ) -> list[str]:
        """Tensors that no parameter is made of, buffers that are computed left out.

        Args:
            parameters: All of the model.
            further_layers: Layers behind the last one that predict further tokens
                (``num_nextn_predict_layers``); each is named once. None: the files have Megatron's
                own names, and every other tensor is named.

        Raises:
            CheckpointError: A tensor belongs to modules that the model has, but has no place in
                it, so that ``config.json`` describes another model.
        """
        table = list(parameters)
        names = {name for p in table for name in (*p.sources, *p.copies, *p.tied)}
        used = {self._stored(name) for name in names}
        rooms = {name.partition(".")[0] for name in used if name is not None} | {"lm_head"}
        first = 1 + max((p.layer for p in table if p.layer is not None), default=-1)
        found: dict[str, None] = {}
        for name in self._file_of:
            if name in used or name.endswith(_COMPUTED):
                continue
            layer = _LAYER.match(name)
            if further_layers is None or name.partition(".")[0] not in rooms:
                found[name] = None
            elif layer is not None and first <= int(layer[1]) < first + further_layers:
                found[f"{layer[0]}* (multi-token prediction)"] = None
            else:
                raise CheckpointError(
                    f"{self.folder}: the model that {CONFIG} describes has no place for the tensor "
                    f"{name}; correct {CONFIG}, or remove the tensor if the model is right"
                )
        return list(found)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        part = self._slice(name)
        return tuple(part.shape if isinstance(part, torch.Tensor) else part.get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor; reads one row."""
        return self.rows(name, 0, 1).dtype

    def rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start`` to ``start + count`` of a tensor."""
        part: torch.Tensor = self._slice(name)[start : start + count]
        return part

    def read(
        self,
        parameter: Parameter,
        start: int = 0,
        count: int | None = None,
        columns: slice = slice(None),
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A Megatron parameter, or part of it.

        Args:
            parameter: Which one.
            start: First row.
            count: Number of rows; None for all.
            columns: Columns.
            dtype: Type of the result; None for that of its first source.

        Raises:
            CheckpointError: A tensor is missing, or has another shape than the model, or is not
                what a copy of it is.
        """
        self.check(parameter)
        for copy in (*parameter.copies, *parameter.tied):
            self._check_copy(parameter, copy, start, count)
        count = parameter.shape[0] - start if count is None else count
        width = [len(range(*columns.indices(size))) for size in parameter.shape[1:]]
        dtype = dtype or self.dtype(parameter.sources[0])
        result: torch.Tensor | None = None
        for segment, position in overlap(parameter.segments, start, count):
            if segment.name is not None:
                part = self._slice(segment.name)
                rows = slice(segment.start, segment.start + segment.count)
                part = part[rows, columns] if width else part[rows]
                check_finite(part, segment.name, self.folder / self._file(segment.name))
                if segment.count == count:
                    return part.to(dtype)
                if result is None:
                    result = torch.zeros(count, *width, dtype=dtype)
                result[position : position + segment.count] = part
        return torch.zeros(count, *width, dtype=dtype) if result is None else result

    def check(self, parameter: Parameter) -> None:
        """See that the sources of a parameter are there and have its shape."""
        for name, count in source_rows(parameter.segments).items():
            if name not in self:
                raise CheckpointError(
                    f"{self.folder}: tensor {name} is missing; Megatron's {parameter.name} is made "
                    "of it"
                )
            found, expected = self.shape(name), (count, *parameter.shape[1:])
            if found != expected:
                raise CheckpointError(
                    f"{self.folder}: tensor {name} has shape {list(found)}, but {CONFIG} or the "
                    f"flags make it {list(expected)} (Megatron's {parameter.name}); look at "
                    f"{_fields(parameter, name, found, expected)}"
                )
            kind = _kind(self._slice(name))
            if kind not in _DTYPE_NAMES.values():
                raise CheckpointError(
                    f"{self.folder / self._file(name)}: tensor {name} holds {kind} numbers; "
                    f"weights are {', '.join(_DTYPE_NAMES.values())}"
                )

    def _check_copy(self, parameter: Parameter, copy: str, start: int, count: int | None) -> None:
        """See that rows of a tensor are the same in its copy, where the files have that."""
        name = parameter.sources[0]
        if copy not in self:
            return
        end = self.shape(name)[0]
        end = end if count is None else min(end, start + count)
        same = self.shape(name) == self.shape(copy) and all(
            torch.equal(self.rows(name, first, size), self.rows(copy, first, size))
            for first in range(start, end, _ROWS)
            for size in (min(_ROWS, end - first),)
        )
        if not same and copy in parameter.tied:
            raise CheckpointError(
                f"{self.folder}: {CONFIG} says tie_word_embeddings, but {copy} is not equal to "
                f"{name}; set tie_word_embeddings to false there, as transformers then does"
            )
        if not same:
            raise CheckpointError(
                f"{self.folder}: {copy} is not equal to {name}; Megatron has one tensor for both, "
                "so leave out --mtp-num-layers"
            )

    def _stored(self, name: str) -> str | None:
        """How the files spell ``name``."""
        if name in self._file_of:
            return name
        for prefix in self._prefixes:
            short = name.removeprefix(prefix)
            if short != name and short in self._file_of:
                return short
        return None

    def _file(self, name: str) -> str:
        """The file that holds a tensor."""
        stored = self._stored(name)
        if stored is None:
            raise CheckpointError(f"{self.folder}: there is no tensor {name}")
        return self._file_of[stored]

    def _slice(self, name: str) -> Any:
        stored = self._stored(name)
        if stored is None:
            raise CheckpointError(f"{self.folder}: there is no tensor {name}")
        opened = self._opened(self._file_of[stored])
        return opened[stored] if isinstance(opened, Mapping) else opened.get_slice(stored)

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(f"{self.folder}: the index names {file}, which is missing")
            check_path(path, "input")
            try:
                if file.endswith(".safetensors"):
                    self._open[file] = safe_open(path, "pt")
                else:
                    # Only archives, which torch.save writes by default, can be mapped.
                    self._open[file] = safe_torch_load(path, mmap=zipfile.is_zipfile(path))
            except SecurityError:
                raise
            except (SafetensorError, OSError, RuntimeError, EOFError, UnpicklingError) as error:
                reason = " ".join(str(error).split())[:300]
                raise CheckpointError(f"{path} is damaged or truncated: {reason}") from error
            self._check_tensors(path, self._open[file])
        return self._open[file]

    def _check_tensors(self, path: Path, opened: Any) -> None:
        """See that a ``.bin`` file holds tensors by name and nothing else."""
        if path.suffix == ".safetensors":
            return
        if isinstance(opened, Mapping) and all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor)
            for name, tensor in opened.items()
        ):
            return
        raise CheckpointError(f"{path} is damaged: tensors by their names are expected, only")

    def _index(self) -> dict[str, str]:
        for name in _INDEXES:
            path = self.folder / name
            if path.is_file():
                values = read_object(path, CheckpointError)
                check(values, {"weight_map": MapOf(TEXT)}, str(path), CheckpointError)
                if "weight_map" not in values:
                    raise CheckpointError(f"{path} has no weight_map")
                for file in values["weight_map"].values():
                    check_relative(file, str(path))
                return dict(values["weight_map"])
        for name in _SINGLE:
            if (self.folder / name).is_file():
                opened = self._opened(name)
                return dict.fromkeys(opened.keys(), name)
        raise CheckpointError(
            f"{self.folder}: there are no weights ({', '.join((*_INDEXES, *_SINGLE))})"
        )


def _kind(part: Any) -> str:
    """Type of a tensor's numbers, in safetensors' words."""
    if isinstance(part, torch.Tensor):
        return _DTYPE_NAMES.get(part.dtype, str(part.dtype).removeprefix("torch."))
    return str(part.get_dtype())


def _fields(
    parameter: Parameter, name: str, found: tuple[int, ...], expected: tuple[int, ...]
) -> str:
    """Keys of ``config.json`` that the differing sizes of a tensor come from."""
    segment = next(segment for segment in parameter.segments if segment.name == name)
    sizes = (segment.size, parameter.columns)
    pairs = zip(sizes, found, expected, strict=False)
    wrong = [size for size, ours, theirs in pairs if size is not None and ours != theirs]
    return " and ".join(dict.fromkeys(CONFIG_KEYS.get(size, size) for size in wrong)) or CONFIG


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
        tensors: Their names and contents, one after the other.
        max_shard_bytes: Largest size of a file that holds more than one tensor.
    """
    shards = _shards(specs, max_shard_bytes)
    names = [
        _SINGLE[0] if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
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
        atomic_write_text(folder / _INDEXES[0], json.dumps(index, indent=2, sort_keys=True))


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
            "dtype": _DTYPE_NAMES[spec.dtype],
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
