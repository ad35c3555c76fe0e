"""Writing the files of a checkpoint inside this process.

Megatron writes with a queue server it spawns and writer processes it forks. Forking a process with
communication threads is risky, and starting processes takes seconds where the data of a small model
takes milliseconds. Here Megatron plans and formats the checkpoint and the same files are written by
this thread, or by one background thread while training goes on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from mindspeed import device
from mindspeed.errors import CheckpointError


@contextmanager
def queue_in_this_process() -> Iterator[None]:
    """While inside, Megatron plans a save with a plain queue instead of a queue server."""
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


class Writing:
    """The files of one checkpoint, being written.

    Args:
        request: Megatron's plan, from ``dist_checkpointing.save(async_sharded_save=True)``.
        in_background: write in a thread; the data is copied first, so training may change it.
    """

    def __init__(self, request: AsyncRequest, *, in_background: bool) -> None:
        self._request = request
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
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

    def finish(self) -> None:
        """Wait for the files, then write the index. Collective.

        Raises:
            CheckpointError: a rank could not write; the index is missing then, and all ranks raise.
        """
        if self._thread is not None:
            self._thread.join()
        failed = self._error is not None
        if _anywhere(failed):
            if failed:
                raise CheckpointError(str(self._error)) from self._error
            raise CheckpointError("another rank could not write its part")
        for finalize in self._request.finalize_fns:
            finalize()

    def _write(self, buckets: list[Any], results: queue.Queue[Any]) -> None:
        outcome: dict[int, Any] = {}
        try:
            for index, bucket in enumerate(buckets):
                answer: queue.Queue[Any] = queue.Queue()
                FileSystemWriterAsync.write_preloaded_data(
                    list(self._request.async_fn.args[0]),
                    local_proc_idx=index,
                    write_bucket=bucket,
                    results_queue=answer,
                    count_queue=_NoCount(),
                    use_fsync=True,
                )
                _, outcome[index] = answer.get()
                if isinstance(outcome[index], BaseException):
                    raise outcome[index]
        except BaseException as error:  # also in a thread: every error is shown by finish()
            self._error = error
        results.put(outcome)


class _NoCount:
    """Stands in for the queue by which Megatron counts its writer processes."""

    def get(self) -> None: ...

    def task_done(self) -> None: ...


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
