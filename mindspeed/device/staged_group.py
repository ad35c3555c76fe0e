"""A process group for tensors in host memory, over the communicator of an accelerator.

Megatron gathers the states of a distributed optimizer in host memory through Gloo, whose
connections (every rank to every other) fail at thousands of ranks. A :class:`StagedGroup` has the
same ranks as a group of the device and needs no connection of its own: it copies a slice to the
device, communicates there, and copies the result back.

    host [n] --slice--> device --gather or scatter--> device --> host, ceil(n / slice) times

Device memory with d ranks and slices of s elements: ``s (d + 1)`` elements on the root, ``s`` on
the others, whatever the tensors' size. A root receives ``(d - 1) n`` elements, others nothing.
(torch_npu performs a gather as an all-gather: there every rank takes what the root does.)

It is a process group of torch: ``dist.gather``, ``scatter``, ``broadcast`` and ``barrier`` take it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from mindspeed.device.detect import current

BACKEND = "staged"


class _Done(Work):
    """The handle of an operation that is complete."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class StagedGroup(ProcessGroup):
    """Made by :func:`staged`.

    Attributes:
        inner: the group of the device that communicates.
        slice_size: elements on the device at a time.
    """

    inner: dist.ProcessGroup
    slice_size: int

    def getBackendName(self) -> str:
        """Name of the backend, under the name that torch calls."""
        return BACKEND

    def gather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> Work:
        """Gather host tensors of the same shape and dtype on all ranks; the root has outputs."""
        (mine,) = inputs
        wholes = [out.view(-1) for out in outputs[0]] if outputs else []
        root, flat = self._global(opts.rootRank), mine.reshape(-1)
        for start, stop, own, parts in self._slices(flat, staging=bool(wholes)):
            own.copy_(flat[start:stop])
            dist.gather(own, parts or None, root, self.inner)
            for whole, part in zip(wholes, parts, strict=True):
                whole[start:stop].copy_(part)
        return _Done()

    def scatter(  # type: ignore[override]
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> Work:
        """Scatter host tensors of the same shape and dtype on all ranks; the root has inputs."""
        mine = outputs[0].view(-1)
        wholes = [tensor.reshape(-1) for tensor in inputs[0]] if inputs else []
        root = self._global(opts.rootRank)
        for start, stop, own, parts in self._slices(mine, staging=bool(wholes)):
            for whole, part in zip(wholes, parts, strict=True):
                part.copy_(whole[start:stop])
            dist.scatter(own, parts or None, root, self.inner)
            mine[start:stop].copy_(own)
        return _Done()

    def broadcast(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any
    ) -> Work:
        """Broadcast host tensors, of the same shape and dtype on all ranks."""
        root = self._global(opts.rootRank)
        for tensor in tensors:
            flat = tensor.view(-1)
            for start, stop, own, _ in self._slices(flat, staging=False):
                own.copy_(flat[start:stop])
                dist.broadcast(own, root, self.inner)
                flat[start:stop].copy_(own)
        return _Done()

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks."""
        dist.barrier(self.inner)
        return _Done()

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.inner, rank)

    def _slices(
        self, flat: torch.Tensor, staging: bool
    ) -> Iterator[tuple[int, int, torch.Tensor, list[torch.Tensor]]]:
        """Yield start and end of each slice, device memory for it and, with staging, all ranks'."""
        size, count = min(self.slice_size, flat.numel()), self.size() if staging else 0
        if not size:
            return
        memory = [flat.new_empty(size, device=current().torch_device()) for _ in range(count + 1)]
        for start in range(0, flat.numel(), size):
            stop = min(start + size, flat.numel())
            own, *parts = (buffer[: stop - start] for buffer in memory)
            yield start, stop, own, parts


def staged(group: dist.ProcessGroup, slice_size: int) -> StagedGroup:
    """Return a group for host tensors with the ranks of ``group``. Collective in ``group``.

    Args:
        group: a group of the device, which communicates.
        slice_size: elements on the device at a time.

    Raises:
        ValueError: ``slice_size`` is not positive.
    """
    if slice_size < 1:
        raise ValueError(f"slice_size must be at least 1, got {slice_size}")
    if BACKEND not in dist.Backend.backend_list:
        made_by: Any = StagedGroup  # stubs of torch do not know its constructor
        dist.Backend.register_backend(
            BACKEND, lambda store, rank, size, timeout: made_by(rank, size), devices=["cpu"]
        )
    made: Any = dist.new_group(
        dist.get_process_group_ranks(group),
        backend=BACKEND,
        use_local_synchronization=True,
        group_desc="STAGED",
    )
    made.inner, made.slice_size = group, slice_size
    return made  # type: ignore[no-any-return]
