"""Saving: plan, write, index, rename, tracker, delete old ones.

A save that fails (disk full, no permission) leaves the checkpoints before it as they are. During
training it is reported and training continues, with the next save as retry; at the end of a run it
is an error.

Megatron writes with a queue server it spawns and writer processes it forks. Forking a process with
communication threads is risky, and starting processes takes seconds where the data of a small model
takes milliseconds. Here Megatron plans and formats the checkpoint and the same files are written by
this thread, or by one background thread while training continues (:class:`Writing`). Every byte
goes through a hash on its way (:mod:`mindspeed.storage.digests`).
"""

from __future__ import annotations

import argparse
import os
import platform
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

import mindspeed
from mindspeed import device
from mindspeed.adaptor.printing import print_rank_0
from mindspeed.adaptor.versions.checkpoints import save_options
from mindspeed.built_model import TrainedModel
from mindspeed.checkpoint.options import CheckpointOptions
from mindspeed.checkpoint.state import sharding_metadata, state_dict, stored_args
from mindspeed.errors import CheckpointError, MindSpeedError
from mindspeed.files import secure_open
from mindspeed.flags import read
from mindspeed.job import Parallel, TrainState
from mindspeed.lora import adapted
from mindspeed.lora.config import DESCRIPTION
from mindspeed.lora.export import export_peft
from mindspeed.lora.state import description
from mindspeed.storage import directory
from mindspeed.storage.digests import DigestingFile, FileDigest
from mindspeed.storage.megatron import errors_kept, queue_in_this_process, write_item

_RESERVE_BYTES = 1 << 20


class Saver:
    """Writes checkpoints of one run.

    Args:
        args: final values.
        model: what is saved.
        config: recipe of the run, put next to each checkpoint.
        flops_per_sample: for the count of operations so far.
        peft: write adapters as a PEFT directory, too.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: TrainedModel,
        config: str,
        flops_per_sample: float,
        *,
        peft: bool = False,
    ) -> None:
        self._args = args
        self._options = read(CheckpointOptions, args)
        assert self._options.save is not None
        self._root = self._options.save
        self._peft = peft
        self._model = model
        self._config = config
        self._flops = flops_per_sample
        self._pending: tuple[int, Writing, dict[str, Any], float] | None = None
        self.last_saved: int | None = None
        self._failure: CheckpointError | None = None
        self._description: str | None = None

    def save(self, state: TrainState, *, last: bool = False) -> None:
        """Save; with ``--async-save`` only begin to. Collective.

        Args:
            state: how far the run is.
            last: the run ends here: wait, and let a failure be an error.

        Raises:
            CheckpointError: ``last`` and the checkpoint could not be written.
        """
        self._complete()
        started = time.perf_counter()
        try:
            writing = self._begin(state)
        except CheckpointError as error:
            self._note_failure(state.iteration, error)
        else:
            self._pending = (state.iteration, writing, self._position(state), started)
            if last or not self._options.async_save:
                self._complete()
        if last and self._failure is not None:
            raise self._failure
        self._say_failure()

    def finish(self, state: TrainState) -> None:
        """Make sure that the last iteration is saved and on disk. Collective.

        Raises:
            CheckpointError: it could not be written.
        """
        self._complete()
        if self.last_saved != state.iteration:
            self.save(state, last=True)

    def poll(self) -> None:
        """Complete a background save if all ranks have written. Collective while one is running."""
        if self._pending is not None and self._pending[1].done_everywhere():
            self._complete()
            self._say_failure()

    def _begin(self, done: TrainState) -> Writing:
        args, options, iteration = self._args, self._options, done.iteration
        path = directory.unfinished_path_of(self._root, iteration)
        metadata = sharding_metadata(args)
        modules = self._model.modules
        adapters = adapted(modules)
        self._description = description(modules, adapters) if adapters is not None else None
        state = state_dict(
            args,
            self._model,
            metadata,
            optimizer=not options.no_save_optim,
            rng=not options.no_save_rng,
            adapter=adapters is not None,
        )
        self._prepare(iteration, _bytes_to_write(state))
        state.update(
            args=stored_args(args, done),
            checkpoint_version=3.0,
            iteration=iteration,
            num_floating_point_operations_so_far=self._flops * done.train_samples,
        )
        strategy = TorchDistSaveShardedStrategy(options.ckpt_format, 1)
        if options.ckpt_fully_parallel_save:
            strategy = FullyParallelSaveStrategyWrapper(
                strategy, parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
        errors: list[BaseException] = []
        with queue_in_this_process(), errors_kept(errors):
            request = dist_checkpointing.save(
                state,
                str(path),
                strategy,
                async_sharded_save=True,
                **save_options(state, metadata),
            )
        return Writing(request, in_background=options.async_save, errors=errors)

    def _prepare(self, iteration: int, size: int) -> None:
        """Make the directory and see that there is room, on rank 0; all ranks learn the outcome.

        Raises:
            CheckpointError: on all ranks, if there is no room or no permission.
        """
        where = device.current().torch_device()
        needed = torch.tensor(size, dtype=torch.float32, device=where)
        dist.all_reduce(needed)
        _on_rank_0(lambda: _make_room(self._root, iteration, needed.item()))

    def _complete(self) -> None:
        if self._pending is None:
            return
        iteration, writing, position, started = self._pending
        self._pending = None
        try:
            digests = writing.finish()
            _on_rank_0(lambda: self._publish(iteration, position, digests, started))
        except CheckpointError as error:
            self._note_failure(iteration, error)
            return
        self.last_saved, self._failure = iteration, None

    def _publish(
        self, iteration: int, position: dict[str, Any], digests: Any, started: float
    ) -> None:
        """Make the written checkpoint the latest one, then clear up. On rank 0."""
        root, options = self._root, self._options
        files = {directory.CONFIG: self._config}
        if self._description is not None:
            files[DESCRIPTION] = self._description
        directory.publish(root, iteration, position, files, digests)
        seconds = time.perf_counter() - started
        deleted: list[int] = []
        try:
            if self._peft and self._description is not None:
                export_peft(directory.path_of(root, iteration), Path(root) / "peft")
            deleted = directory.remove_old(root, options.keep_last, options.save_retain_interval)
            directory.remove_leftovers(root)
        except (OSError, MindSpeedError) as error:
            print(f" WARNING after saving iteration {iteration}: {error}", flush=True)
        print(
            f" saved iteration {iteration} to {root} in {seconds:.1f} s"
            + (f", deleted {', '.join(map(str, deleted))}" if deleted else ""),
            flush=True,
        )

    def _note_failure(self, iteration: int, error: CheckpointError) -> None:
        root = self._root
        good = directory.tracked(root)
        intact = f"the checkpoint of iteration {good} is intact" if good else "there is none yet"
        self._failure = CheckpointError(f"iteration {iteration} was not saved: {error}; {intact}")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(directory.unfinished_path_of(root, iteration), ignore_errors=True)

    def _say_failure(self) -> None:
        if self._failure is not None:
            print_rank_0(f" WARNING {self._failure}; training continues")
        self._failure = None

    def _position(self, state: TrainState) -> dict[str, Any]:
        parallel = Parallel.of(self._args)
        return {
            "mindspeed": mindspeed.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **state.saved(),
            "layout": {
                "world_size": parallel.world,
                "tensor": parallel.tensor,
                "pipeline": parallel.pipeline,
                "context": parallel.context,
                "expert": parallel.expert,
                "data": parallel.data,
            },
        }


def _make_room(root: str, iteration: int, needed: float) -> None:
    """Create an empty directory for ``needed`` bytes.

    Raises:
        CheckpointError: There is no room for them.
    """
    path = directory.begin(root, iteration)
    free = shutil.disk_usage(path.parent).free
    if free < needed + _RESERVE_BYTES:
        raise CheckpointError(
            f"No space left on device: {needed:.2e} bytes are needed, {free:.2e} are free"
        )


def _on_rank_0(action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0; what goes wrong there is an error on all ranks. Collective.

    Raises:
        CheckpointError: It failed; says why.
    """
    answer: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except (OSError, MindSpeedError) as error:
            answer = [str(error)]
    dist.broadcast_object_list(answer, src=0)
    if answer[0] is not None:
        raise CheckpointError(answer[0])


def _bytes_to_write(state: dict[str, Any]) -> int:
    """Bytes of the tensors that this rank, as the main holder, contributes."""
    total = 0
    for part in nested_values(state):
        data = getattr(part, "data", None)
        if isinstance(data, torch.Tensor) and is_main_replica(getattr(part, "replica_id", 0)):
            total += data.numel() * data.element_size()
    return total


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
