"""Megatron's checkpoint writer and reader: the names inside that are replaced for one call.

Everything here is undone on exit. ``dist_checkpointing`` itself is used as its public API.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint import filesystem as torch_filesystem
from torch.distributed.checkpoint.filesystem import FileSystem

from mindspeed.adaptor.versions.checkpoints import common_state_writers, reader_makers


@contextmanager
def queue_in_this_process() -> Iterator[None]:
    """While inside, Megatron plans a save with a plain queue instead of a queue server."""
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


@contextmanager
def errors_kept(errors: list[BaseException]) -> Iterator[None]:
    """While inside, what Megatron writes on rank 0 alone keeps its error instead of raising it.

    The other ranks continue to a collective, so rank 0 must get there. Afterwards all ranks can
    agree that the checkpoint has failed.

    Args:
        errors: Gets what was raised (a full disk, no permission).
    """

    def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def kept(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except (OSError, RuntimeError) as error:  # torch.save has RuntimeError for a full disk
                errors.append(error)

        return kept

    places: list[tuple[Any, str]] = [
        *common_state_writers(),
        (filesystem_async.FileSystemWriterAsync, "finish"),
        (serialization, "save_config"),
    ]
    with ExitStack() as stack:
        for holder, name in places:
            undo = (
                (setattr, holder, name, vars(holder)[name])
                if name in vars(holder)
                else (delattr, holder, name)  # inherited: ``finish``, before 0.15
            )
            setattr(holder, name, keeping(getattr(holder, name)))
            stack.callback(*undo)
        yield


def write_item(request: AsyncRequest, file: Any, data: torch.Tensor, item: Any, name: str) -> Any:
    """Write one item of a planned save, as Megatron's own writer does.

    Args:
        request: The plan, from ``dist_checkpointing.save(async_sharded_save=True)``.
        file: Open for writing.
        data: The tensor, or bytes of an object.
        item: Its entry in the plan.
        name: Of the file, for the index.

    Returns:
        The entry of the index.
    """
    formats = getattr(torch_filesystem, "SerializationFormat", None)  # torch 2.7 has but one
    options = {"serialization_format": formats.TORCH_SAVE} if formats else {}
    return filesystem_async._write_item(
        *request.async_fn.args[0], file, data, item, name, **options
    )


@contextmanager
def files_read_by(files: FileSystem) -> Iterator[None]:
    """While inside, Megatron's reader opens files through ``files``."""

    def reading(make: Callable[..., Any]) -> Callable[..., Any]:
        def reader(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            made.fs = files
            return made

        return reader

    makers = {name: getattr(torch_strategy, name) for name in reader_makers()}
    for name, make in makers.items():
        setattr(torch_strategy, name, reading(make))
    try:
        yield
    finally:
        for name, make in makers.items():
            setattr(torch_strategy, name, make)
