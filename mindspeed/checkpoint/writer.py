"""Writing the files of a checkpoint, and their digests, inside this process.

Megatron writes with a queue server it spawns and writer processes it forks. Forking a process with
communication threads is risky, and starting processes takes seconds where the data of a small model
takes milliseconds. Here Megatron plans and formats the checkpoint and the same files are written by
this thread, or by one background thread while training goes on. Every byte goes through a hash on
its way (:mod:`mindspeed.storage.digests`).
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from torch.distributed.checkpoint.filesystem import SerializationFormat

from mindspeed import device
from mindspeed.errors import CheckpointError
from mindspeed.files import secure_open
from mindspeed.storage.digests import DigestingFile, FileDigest


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

    The other ranks go on to a collective, so rank 0 must get there, too. Afterwards all ranks can
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
        (TorchCommonSaveStrategy, "save_common"),
        (filesystem_async.FileSystemWriterAsync, "finish"),
        (serialization, "save_config"),
    ]
    with ExitStack() as stack:
        for holder, name in places:
            before = vars(holder)[name]
            setattr(holder, name, keeping(before))
            stack.callback(setattr, holder, name, before)
        yield


class Writing:
    """The files of one checkpoint, being written.

    Args:
        request: Megatron's plan, from ``dist_checkpointing.save(async_sharded_save=True)``.
        in_background: write in a thread; the data is copied first, so training may change it.
        errors: What went wrong on this rank already.
    """

    def __init__(
        self, request: AsyncRequest, *, in_background: bool, errors: Sequence[BaseException] = ()
    ) -> None:
        self._request = request
        self._error: BaseException | None = next(iter(errors), None)
        self._thread: threading.Thread | None = None
        self._digests: dict[str, FileDigest] = {}
        if request.async_fn is None:  # nothing to write on this rank
            return
        _, _, results = request.async_fn_args
        buckets = request.preload_fn()
        if in_background:
            if device.current().name == "cpu":
                buckets = _copied(buckets)
            self._thread = threading.Thread(
                target=self._write, args=(buckets, results), name="checkpoint-writer", daemon=True
            )
            self._thread.start()
        else:
            self._write(buckets, results)

    def done_everywhere(self) -> bool:
        """Whether all ranks have written their files. Collective."""
        running = self._thread is not None and self._thread.is_alive()
        return not _anywhere(running)

    def finish(self) -> dict[str, FileDigest]:
        """Wait for the files, then write the index. Collective.

        Returns:
            The digests of the files of all ranks.

        Raises:
            CheckpointError: a rank could not write; the index is missing then, and all ranks raise.
        """
        if self._thread is not None:
            self._thread.join()
        self._raise_everywhere()
        errors: list[BaseException] = []
        with errors_kept(errors):
            for finalize in self._request.finalize_fns:
                finalize()
        self._error = next(iter(errors), None)
        self._raise_everywhere()
        written: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(written, self._digests)
        return {name: digest for files in written for name, digest in files.items()}

    def _raise_everywhere(self) -> None:
        """Raise on all ranks if this or another one has an error. Collective."""
        failed = self._error is not None
        if _anywhere(failed):
            if failed:
                reason = str(self._error).strip().splitlines() or [repr(self._error)]
                raise CheckpointError(reason[0]) from self._error
            raise CheckpointError("another rank could not write its part")

    def _write(self, buckets: list[Any], results: queue.Queue[Any]) -> None:
        outcome: dict[int, Any] = {}
        try:
            for index, (path, name, (objects, tensors)) in enumerate(buckets):
                with secure_open(path, "wb") as raw:
                    file = DigestingFile(raw)
                    outcome[index] = [
                        filesystem_async._write_item(
                            *self._request.async_fn.args[0],
                            file,
                            data,
                            item,
                            name,
                            serialization_format=SerializationFormat.TORCH_SAVE,
                        )
                        for item, data in (*objects, *tensors)
                    ]
                    raw.flush()
                    os.fsync(raw.fileno())
                self._digests[name] = file.hash.digest()
        except BaseException as error:  # also in a thread: every error is shown by finish()
            self._error = error
        results.put(outcome)


def _copied(buckets: list[Any]) -> list[Any]:
    return [
        (path, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for path, key, (data, tensors) in buckets
    ]


def _anywhere(flag: bool) -> bool:
    where = device.current().torch_device()
    total = torch.tensor([int(flag)], dtype=torch.int32, device=where)
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return bool(total.item())
