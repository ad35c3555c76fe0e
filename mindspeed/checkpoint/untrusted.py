"""The index of a checkpoint is a pickle; look through it before anybody unpickles it.

torch.distributed.checkpoint stores its index (``.metadata``) as a pickle. A pickle may name any
function of any installed package and have it called. :func:`read_index` reads the file with an
unpickler that knows the few classes an index consists of and refuses every other name.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from mindspeed.errors import SecurityError
from mindspeed.security import enum_member

_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
)
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
}


def read_index(checkpoint: Path) -> Metadata:
    """The index of a checkpoint; refused if it names anything that an index does not need.

    Raises:
        SecurityError: names the module and the object.
    """
    try:
        with open(checkpoint / ".metadata", "rb") as file:
            index: Metadata = _IndexReader(file).load()
    except SecurityError as error:
        raise SecurityError(f"refusing to load {checkpoint}: {error}") from None
    return index


class _IndexReader(pickle.Unpickler):
    """Resolves the classes of an index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        plain = module in _MODULES and "." not in name
        if plain or is_dtype or (module, name) in _NAMES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        raise SecurityError(
            f"its index asks for {module}.{name}, which no index of a checkpoint needs; it may run "
            "code"
        )
