"""Unpickling of files without running code: the only way into a pickle that a checkpoint holds.

A pickle may name any function of any installed package and have it called. The formats of
checkpoints hold pickles in three places, and each has an allow-list here:

| pickle in a checkpoint                         | opened with         | may name             |
| ---------------------------------------------- | ------------------- | -------------------- |
| index (``.metadata``)                          | :func:`read_index`  | data classes         |
| objects (``.pt``, byte entries of ``.distcp``) | :func:`read_object` | what torch and       |
|                                                |                     | Megatron list        |
| fp8 state of an engine, as a byte tensor       | :func:`read_state`  | tensors, fp8 recipes |

torch reads the first two without a list and NVIDIA's engine the third.
:mod:`mindspeed.adaptor.repairs.checkpoints.checkpoint_pickles` puts these functions in their place.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import re
from collections.abc import Collection
from enum import Enum
from pathlib import PurePosixPath
from typing import IO, Any, cast

from mindspeed.errors import DamagedCheckpoint, MindSpeedError, SecurityError
from mindspeed.security import ENUM_MEMBER, enum_member

_INDEX_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
)
_INDEX_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
}
_STATE_NAMES = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch", "device"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
}
_RECIPES = "transformer_engine.common.recipe"


def read_index(file: IO[bytes] | io.RawIOBase) -> Any:
    """The index of a ``torch.distributed.checkpoint`` directory.

    Args:
        file: An open ``.metadata``.

    Returns:
        ``torch.distributed.checkpoint.metadata.Metadata``.

    Raises:
        SecurityError: It names an object that no index needs, or a file outside its directory.
        DamagedCheckpoint: It is no pickle.
    """
    try:
        index = _IndexReader(cast(IO[bytes], file)).load()
    except SecurityError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise DamagedCheckpoint(f"it is damaged: {error!r}") from error
    for info in (getattr(index, "storage_data", None) or {}).values():
        check_relative(getattr(info, "relative_path", ""), "its index")
    return index


def read_object(file: IO[bytes], **options: Any) -> Any:
    """What ``torch.save`` wrote: tensors, plain containers, and classes registered as safe.

    Args:
        file: Open for reading.
        **options: Arguments of ``torch.load``.

    Raises:
        SecurityError: It names anything else.
        DamagedCheckpoint: It is no file of ``torch.save``.
    """
    import torch

    torch.serialization.add_safe_globals([ENUM_MEMBER])
    try:
        return torch.load(file, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise refusal(error) from None


def read_state(data: bytes) -> Any:
    """The fp8 state of a module of NVIDIA's Transformer Engine: scales, histories, a recipe.

    Raises:
        SecurityError: It names anything else.
    """
    return _StateReader(io.BytesIO(data)).load()


def refusal(error: pickle.UnpicklingError) -> MindSpeedError:
    """Why ``torch.load(weights_only=True)`` refused a file, as one sentence.

    Returns:
        A :class:`SecurityError` if it names what is not listed, else a :class:`DamagedCheckpoint`.
    """
    if wanted := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return SecurityError(
            f"an entry holds more than tensors (it names {wanted[1]}); loading it could run any "
            "code"
        )
    reason = str(error).split("WeightsUnpickler error:")[-1].strip().splitlines()
    return DamagedCheckpoint(f"an entry is damaged ({reason[0] if reason else 'no pickle'})")


def check_relative(name: Any, where: str) -> str:
    """A file name found in a file: inside the directory of that file, or refused.

    Args:
        name: The name as found.
        where: The file that contains the name, for the message.

    Raises:
        SecurityError: The name is absolute or leads out of the directory.
    """
    path = PurePosixPath(name) if isinstance(name, str) else None
    if path is None or path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise SecurityError(f"{where} names the file {name!r}, which is outside its directory")
    return str(name)


class PickleModule:
    """Stands in for the module :mod:`pickle` where only fp8 state is read and written."""

    dumps = staticmethod(pickle.dumps)
    UnpicklingError = pickle.UnpicklingError
    HIGHEST_PROTOCOL = pickle.HIGHEST_PROTOCOL

    @staticmethod
    def loads(data: bytes, **options: Any) -> Any:
        """:func:`read_state`."""
        return read_state(data)


class _DataReader(pickle.Unpickler):
    """Resolves dtypes, enum members, ``names``, data classes of ``modules``, and nothing else."""

    names: Collection[tuple[str, str]]
    modules: Collection[str]
    refusal: str

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "pathlib._local":  # as Python 3.13 writes it
            module = "pathlib"
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in self.names:
            return super().find_class(module, name)
        if module in self.modules and "." not in name:
            found = super().find_class(module, name)
            if _is_plain_data(found, module):
                return found
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        raise SecurityError(self.refusal.format(f"{module}.{name}"))


class _IndexReader(_DataReader):
    names, modules = _INDEX_NAMES, _INDEX_MODULES
    refusal = "its index names {}, which no index of a checkpoint needs; it may run code"


class _StateReader(_DataReader):
    names, modules = _STATE_NAMES, (_RECIPES,)
    refusal = "an fp8 state names {}, which none needs; it may run code"

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: read_object(io.BytesIO(data))
        return super().find_class(module, name)


def _is_plain_data(found: Any, module: str) -> bool:
    """Whether this is a class of ``module`` that only holds values."""
    return (
        isinstance(found, type)
        and found.__module__ == module
        and (dataclasses.is_dataclass(found) or issubclass(found, (Enum, tuple)))
    )
