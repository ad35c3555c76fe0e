"""Adapters from files: a checkpoint of ours, or a directory of the ``peft`` package."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindspeed.checkpoint import directory
from mindspeed.errors import CheckpointError
from mindspeed.lora.config import DESCRIPTION, LoraConfig

PEFT_CONFIG = "adapter_config.json"


def is_adapter(path: str | Path) -> bool:
    """Whether a directory holds an adapter: checkpoints of ours, or PEFT files."""
    return is_peft(path) or _checkpoint(path) is not None


def is_peft(path: str | Path) -> bool:
    """Whether a directory holds PEFT files."""
    return (Path(path) / PEFT_CONFIG).is_file()


def load(chunks: Iterable[Any], path: str | Path) -> LoraConfig:
    """Load an adapter into a model; attach it first if the model has none. Collective.

    Args:
        chunks: This rank's pipeline stages, wrapped for precision or not.
        path: ``--save`` of a LoRA training, one iteration of it, or a PEFT directory.

    Returns:
        Its options.

    Raises:
        CheckpointError: There is no adapter, or it belongs to another model; names the tensor.
    """
    raise CheckpointError(f"{path} holds no adapter")


def _checkpoint(path: str | Path) -> Path | None:
    """Directory of the iteration that holds an adapter."""
    path = Path(path)
    if (path / DESCRIPTION).is_file():
        return path
    for found in directory.candidates(path):
        return found if (found / DESCRIPTION).is_file() else None
    return None
