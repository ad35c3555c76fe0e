"""The index and the common part of a checkpoint, read without running code.

torch.distributed.checkpoint stores its index (``.metadata``) as a pickle, which may name any
function and have it called. :func:`read_index` reads the file of a directory with
:func:`mindspeed.unpickle.read_index`, which knows the few classes that an index consists of.

The common part (``common.pt``, since megatron-core 0.19 an object among the tensors) may hold
tensors and plain values alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, cast

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mindspeed import unpickle
from mindspeed.errors import CheckpointError, DamagedCheckpoint, SecurityError
from mindspeed.security import safe_torch_load
from mindspeed.storage.digests import CheckedFile, Digests, FileSlice
from mindspeed.storage.directory import COMMON_STATE


def read_index(checkpoint: Path, digests: Digests | None = None) -> Metadata:
    """The index of a checkpoint; refused if it names anything that an index does not need.

    Args:
        checkpoint: Directory of one iteration.
        digests: Its digests, where it has them.

    Raises:
        SecurityError: names the module and the object.
        DamagedCheckpoint: it is damaged.
        CheckpointError: it cannot be opened.
    """
    try:
        with CheckedFile(checkpoint / ".metadata", digests) as file:
            index = unpickle.read_index(cast(IO[bytes], file))
    except SecurityError as error:
        raise SecurityError(f"refusing to load {checkpoint}: {error}") from None
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{checkpoint}/.metadata cannot be read: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{checkpoint}/.metadata: {error.strerror}") from error
    if not isinstance(index, Metadata):
        raise DamagedCheckpoint(f"{checkpoint}/.metadata is no index of a checkpoint")
    return index


def common_state(path: Path) -> dict[str, Any]:
    """What a ``torch_dist`` checkpoint holds besides tensors: values of the run, iteration ...

    Raises:
        SecurityError: It holds more than tensors and plain values.
        DamagedCheckpoint: It is damaged.
    """
    file = path / "common.pt"
    try:
        common = safe_torch_load(file) if file.is_file() else _common_object(path)
    except SecurityError:
        raise
    except (RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
        raise DamagedCheckpoint(f"{file} is damaged: {error}") from error
    if not isinstance(common, dict):
        raise DamagedCheckpoint(f"{file} is no common part of a checkpoint")
    return common


def _common_object(path: Path) -> Any:
    digests = Digests.read(path)
    info = read_index(path, digests).storage_data.get(MetadataIndex(COMMON_STATE))
    if info is None:
        raise DamagedCheckpoint(f"{path}: common.pt is missing")
    with CheckedFile(path / info.relative_path, digests) as file:
        part: Any = FileSlice(file, info.offset, info.length)
        (common,) = unpickle.read_object(part, map_location="cpu")
    return common
