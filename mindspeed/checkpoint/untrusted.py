"""The index of a checkpoint is a pickle; it is read through an allow-list.

torch.distributed.checkpoint stores its index (``.metadata``) as a pickle, which may name any
function and have it called. :func:`read_index` reads the file of a directory with
:func:`mindspeed.unpickle.read_index`, which knows the few classes that an index consists of.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from mindspeed import unpickle
from mindspeed.errors import CheckpointError, SecurityError


def read_index(checkpoint: Path) -> Metadata:
    """The index of a checkpoint; refused if it names anything that an index does not need.

    Raises:
        SecurityError: names the module and the object.
        CheckpointError: it is damaged.
    """
    try:
        with open(checkpoint / ".metadata", "rb") as file:
            index = unpickle.read_index(file)
    except SecurityError as error:
        raise SecurityError(f"refusing to load {checkpoint}: {error}") from None
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{checkpoint}/.metadata is damaged: {error!r}") from error
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{checkpoint}/.metadata is no index of a checkpoint")
    return index
