"""What a rank has recorded of a step: lines of JSON, and the tensors that they refer to.

    DIR/step-000000/NAME-00003.jsonl
    DIR/step-000000/NAME-00003.safetensors

The tensors are written first, both atomically, so lines that are there have theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed.errors import DataError
from mindspeed.files import atomic_write_text, atomic_writer, make_dirs
from mindspeed.parsing import decode_json


def write(
    directory: Path,
    step: int,
    name: str,
    rank: int,
    lines: Iterable[Mapping[str, Any]],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Write the lines of a rank, and the tensors ``[...]`` beside them.

    Args:
        directory: Of the recording.
        step: Number of the step.
        name: Of the kind of files.
        rank: Global.
        lines: Of JSON.
        tensors: On the host.
    """
    path = make_dirs(directory / f"step-{step:06d}") / f"{name}-{rank:05d}.jsonl"
    write_tensors(path, tensors)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    atomic_write_text(path, text)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the tensors ``[...]`` that a file refers to beside it."""
    from safetensors.torch import save

    with atomic_writer(path.with_suffix(".safetensors"), "wb") as file:
        file.write(save(dict(tensors)))


def read_lines(path: Path) -> list[Any]:
    """The lines of a file.

    Raises:
        DataError: It is damaged.
    """
    try:
        return [decode_json(line) for line in path.read_text("utf-8").splitlines()]
    except (ValueError, OSError) as error:
        raise damaged(path, error) from error


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors ``[...]`` beside a file.

    Raises:
        DataError: They are damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(path.with_suffix(".safetensors").read_bytes())
    except (ValueError, OSError, SafetensorError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> DataError:
    """What to raise for a file that cannot be read."""
    if isinstance(error, DataError):  # a ValueError, too
        return error
    return DataError(f"{path}: damaged, record again: {error}")
