"""Reading the sharded part of a checkpoint: every block is checked, and errors say what is wrong.

Megatron plans the reading and torch's checkpoint library opens the files. Here that library opens
them through :class:`~mindspeed.storage.digests.CheckedFile`, and what it wraps into one report
of all ranks becomes one of our errors, on all ranks alike.
"""

from __future__ import annotations

import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from mindspeed import device
from mindspeed.errors import CheckpointError, DamagedCheckpoint, MindSpeedError
from mindspeed.storage.digests import CheckedFile, Digests
from mindspeed.storage.megatron import files_read_by
from mindspeed.unpickle import refusal

_DAMAGE = (CheckpointException, CheckpointingException, OSError, RuntimeError, EOFError, ValueError)


def read_sharded(wanted: dict[str, Any], checkpoint: Path, **options: Any) -> dict[str, Any]:
    """Fill a sharded state dict. Collective.

    Args:
        wanted: Megatron's sharded tensors and objects.
        checkpoint: Directory of one iteration.
        **options: Arguments of ``dist_checkpointing.load``.

    Returns:
        The same with data, and the common part.

    Raises:
        DamagedCheckpoint: A file is not what was written; on all ranks.
        CheckpointError: Loading failed though all that was read has its digest; on all ranks.
        SecurityError: An object would run code; on all ranks.
    """
    digests = Digests.read(checkpoint)
    try:
        with files_read_by(_CheckedFiles(digests)), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            state: dict[str, Any] = dist_checkpointing.load(wanted, str(checkpoint), **options)
    except MindSpeedError:
        raise
    except _DAMAGE as error:
        raise _cause(error, checkpoint, verified=digests is not None) from error
    return state


def on_all_ranks(action: Callable[[], Any]) -> Any:
    """Run ``action`` on this rank; if it raises on one rank, all ranks raise. Collective.

    Raises:
        DamagedCheckpoint: A file is not what was written, on some rank.
        CheckpointError: Another rank raised another error; says which and what.
    """
    error: MindSpeedError | None = None
    result = None
    try:
        result = action()
    except MindSpeedError as raised:
        error = raised
    except _DAMAGE as raised:
        error = DamagedCheckpoint(_described(raised))
        error.__cause__ = raised
    kind = 0 if error is None else 1 if isinstance(error, DamagedCheckpoint) else 2
    worst = torch.tensor([kind], dtype=torch.int32, device=device.current().torch_device())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if worst.item() == 0:
        return result
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (kind, str(error)))
    if error is not None and kind == worst.item():
        raise error
    rank = next(rank for rank, (other, _) in enumerate(found) if other == worst.item())
    raise (CheckpointError if worst.item() == 2 else DamagedCheckpoint)(
        f"rank {rank}: {found[rank][1]}"
    )


class _CheckedFiles(FileSystem):
    """torch's access to files, for reading."""

    def __init__(self, digests: Digests | None) -> None:
        self._digests = digests

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with CheckedFile(Path(path), self._digests) as file:
            yield file


def _cause(error: BaseException, checkpoint: Path, *, verified: bool) -> MindSpeedError:
    """What went wrong first, on any rank, in one sentence.

    Files without digests may hold anything, so that any exception can mean damage. What was read
    and ``verified`` is what was written: an ``AttributeError`` is then a defect of the program, and
    an older checkpoint would not help.
    """
    failures = cast(dict[int, Any], getattr(error, "failures", {}))
    for failure, _ in (failures[rank] for rank in sorted(failures)):
        if isinstance(failure, pickle.UnpicklingError):
            failure = refusal(failure)
        if isinstance(failure, MindSpeedError):
            return type(failure)(f"{checkpoint}: {failure}")
    first, frames = next((failures[rank] for rank in sorted(failures)), (error, None))
    if verified and not isinstance(first, _DAMAGE):
        return CheckpointError(
            f"{checkpoint} has its digests but cannot be loaded: {_described(first, frames)}"
        )
    return DamagedCheckpoint(f"damaged: {_described(first, frames)}")


def _described(error: BaseException, frames: traceback.StackSummary | None = None) -> str:
    """Type, first line of the text, and place of an exception of this rank or of another one."""
    text = (str(error).strip() or repr(error)).splitlines()[0][:200]
    found = frames or traceback.extract_tb(error.__traceback__)
    place = f" ({found[-1].filename}:{found[-1].lineno}, {found[-1].name})" if found else ""
    return f"{type(error).__name__}: {text}{place}"
