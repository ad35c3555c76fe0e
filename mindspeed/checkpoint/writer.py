"""Writing the files of a checkpoint, and their digests, inside this process.

Megatron writes with a queue server it spawns and writer processes it forks. Forking a process with
communication threads is risky, and starting processes takes seconds where the data of a small model
takes milliseconds. Here Megatron plans and formats the checkpoint and the same files are written by
this thread, or by one background thread while training continues. Every byte goes through a hash on
its way (:mod:`mindspeed.storage.digests`).
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from mindspeed import device
from mindspeed.errors import CheckpointError
from mindspeed.files import secure_open
from mindspeed.storage.digests import DigestingFile, FileDigest
from mindspeed.storage.megatron import errors_kept, write_item


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
            if device.current().on_host:
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
                        write_item(self._request, file, data, item, name)
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
