"""Files of the legacy format: one for each tensor, pipeline and expert rank.

    release/mp_rank_00/model_optim_rng.pt              tensor rank 0
    release/mp_rank_00_001/model_optim_rng.pt          tensor rank 0 of pipeline rank 1
    release/mp_rank_00_001_003/model_optim_rng.pt      expert rank 3 of that
    release/mp_rank_00_model_states.pt                 as DeepSpeed has it

Each holds ``model`` (or ``model0``, ``model1`` ... with virtual stages, ``module`` for DeepSpeed),
the values of the run in ``args``, and possibly the optimizer, which is not read.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mindspeed.errors import CheckpointError, SecurityError
from mindspeed.files import make_dirs, secure_open
from mindspeed.security import safe_torch_load

_DIRECTORY = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_DEEPSPEED = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?_model_states\.pt")
_NAMES = ("model_optim_rng.pt", "model_rng.pt")
_AFTER_DATA = b"PK\x07\x08"  # begins a data descriptor: checksum, sizes
_CHUNK = re.compile(r"model(\d*)|module")


@dataclass(frozen=True)
class Rank:
    """Position of a file."""

    tensor: int
    pipeline: int
    expert: int


def is_legacy(folder: Path) -> bool:
    """Whether a directory holds files of ranks."""
    return any(_numbers(path) for path in folder.glob("mp_rank_*"))


def file_name(rank: Rank, *, pipeline: bool, expert: bool, deepspeed: bool) -> str:
    """Name of the file of a rank, below the directory of the checkpoint.

    Args:
        rank: Whose.
        pipeline: There is more than one pipeline rank.
        expert: There is more than one expert rank.
        deepspeed: In DeepSpeed's layout.
    """
    name = f"mp_rank_{rank.tensor:02d}"
    name += f"_{rank.pipeline:03d}" if pipeline else ""
    name += f"_{rank.expert:03d}" if expert else ""
    return f"{name}_model_states.pt" if deepspeed else f"{name}/{_NAMES[0]}"


def load_files(folder: Path) -> tuple[argparse.Namespace | None, dict[Rank, list[dict[str, Any]]]]:
    """Map all files of a checkpoint into memory, without reading their tensors.

    Returns:
        The values of the run, if they are there; and for each rank the state of its virtual stages.

    Raises:
        CheckpointError: A file is damaged, or one is missing.
        SecurityError: A file holds more than tensors and plain values.
    """
    found = {
        path: numbers for path in sorted(folder.glob("mp_rank_*")) if (numbers := _numbers(path))
    }
    loaded = {path: _load(_file(path)) for path in found}
    args = next((state["args"] for state in loaded.values() if "args" in state), None)
    pipelined = getattr(args, "pipeline_model_parallel_size", 2) > 1
    ranks: dict[Rank, list[dict[str, Any]]] = {}
    for path, (tensor, *others) in found.items():
        if len(others) == 1 and not pipelined:
            others = [0, *others]
        pipeline, expert = (*others, 0, 0)[:2]
        ranks[Rank(tensor, pipeline, expert)] = _chunks(loaded[path], path)
    for tensor in range(1 + max(rank.tensor for rank in ranks)):
        for pipeline in range(1 + max(rank.pipeline for rank in ranks)):
            for expert in range(1 + max(rank.expert for rank in ranks)):
                if Rank(tensor, pipeline, expert) not in ranks:
                    raise CheckpointError(
                        f"{folder}: the file of tensor rank {tensor}, pipeline rank {pipeline}, "
                        f"expert rank {expert} is missing"
                    )
    return args, ranks


def _numbers(path: Path) -> list[int]:
    match = _DIRECTORY.fullmatch(path.name) or _DEEPSPEED.fullmatch(path.name)
    return [int(number) for number in match.groups() if number is not None] if match else []


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in _NAMES:
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"{path} holds neither {' nor '.join(_NAMES)}")


def _load(path: Path) -> dict[str, Any]:
    try:
        # Only archives, which torch.save writes by default, can be mapped.
        state: dict[str, Any] = safe_torch_load(path, mmap=zipfile.is_zipfile(path))
    except SecurityError:
        raise
    except (RuntimeError, OSError, EOFError) as error:
        raise CheckpointError(
            f"{path} is damaged or truncated: {str(error).splitlines()[0]}"
        ) from error
    return state


def _chunks(state: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """The states of the virtual stages, in order."""
    matches = [match for key in state if (match := _CHUNK.fullmatch(key))]
    chunks = [state[m[0]] for m in sorted(matches, key=lambda m: int(m[1] or 0))]
    if not chunks:
        raise CheckpointError(f"{path} holds no model: its keys are {', '.join(state)}")
    if any("language_model" in chunk for chunk in chunks):
        raise CheckpointError(
            f"{path} was written by Megatron's model classes before Megatron Core "
            "(--use-legacy-models), which are not supported"
        )
    return chunks


class RankFile:
    """One file that is being written: first everything but the tensors, then tensor by tensor.

    Args:
        path: The file; its directory is made.
        chunks: For each virtual stage, name -> type and shape.
        extra: What else is in the file.
        deepspeed: The model is called ``module``.
    """

    def __init__(
        self,
        path: Path,
        chunks: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]],
        extra: Mapping[str, Any],
        *,
        deepspeed: bool,
    ) -> None:
        self._path = path
        single = "module" if deepspeed else "model"
        state: dict[str, Any] = {}
        for number, chunk in enumerate(chunks):
            # Memory that is never touched takes no room.
            tensors = {
                name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in chunk.items()
            }
            state[single if len(chunks) == 1 else f"model{number}"] = tensors
        make_dirs(path.parent)
        with secure_open(path, "wb") as file, torch.serialization.skip_data():
            torch.save({**state, **extra}, file)
        names = [(number, name) for number, chunk in enumerate(chunks) for name in chunk]
        self._members = dict(zip(names, _members(path), strict=True))
        self._sizes = {
            (number, name): dtype.itemsize * math.prod(shape)
            for number, chunk in enumerate(chunks)
            for name, (dtype, shape) in chunk.items()
        }

    def write(self, chunk: int, name: str, tensor: torch.Tensor) -> None:
        """Overwrite a tensor in the file.

        Args:
            chunk: Number of the model chunk.
            name: Name in the chunk.
            tensor: Any shape and dtype with the number of bytes that was announced; on the CPU.
        """
        if tensor.nbytes != self._sizes[chunk, name]:
            raise ValueError(f"{name}: {tensor.nbytes} bytes, not {self._sizes[chunk, name]}")
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        member, checksum = self._members[chunk, name], struct.pack("<I", zlib.crc32(data.data))
        with secure_open(self._path, "r+b") as file:
            file.seek(member.data)
            file.write(data)
            # torch.load does not look at checksums; whoever tests or unpacks the archive does.
            if file.read(4) == _AFTER_DATA:
                file.write(checksum)
            file.seek(member.entry + 16)
            file.write(checksum)

    def finish(self) -> None:
        """Bring it to the disk."""
        with secure_open(self._path, "r+b") as file:
            os.fsync(file.fileno())


class _Member(NamedTuple):
    """Offsets of a tensor's contents in its file, and of its entry in the archive's directory."""

    data: int
    entry: int


def _members(path: Path) -> Iterator[_Member]:
    """Places of the tensors of a ``torch.save`` file, in the order of saving.

    Such a file is an uncompressed zip archive with members ``<name>/data/0``, ``<name>/data/1`` ...
    """
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        found: dict[int, _Member] = {}
        entry = archive.start_dir
        for member in archive.infolist():
            folder, _, number = member.filename.rpartition("/")
            if folder.endswith("/data") and number.isdecimal():
                file.seek(member.header_offset + 26)  # 30 bytes, a name, extra fields
                before = sum(struct.unpack("<HH", file.read(4)))
                found[int(number)] = _Member(member.header_offset + 30 + before, entry)
            file.seek(entry + 28)  # 46 bytes, a name, extra fields, a comment
            entry += 46 + sum(struct.unpack("<HHH", file.read(6)))
    yield from (found[number] for number in sorted(found))
