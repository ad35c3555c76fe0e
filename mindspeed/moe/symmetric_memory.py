"""Rows exchanged by sizes on the device: ``torch.ops.symm_mem.all_to_all_vdev``, on NVIDIA GPUs.

    send  [n, pitch]  a rank's rows, those for each rank one after the other
    op    every rank reads its rows out of the buffers of the others, by sizes that the device has
    out   [bound, h]  the rows of each rank one after the other

Buffers lie in symmetric memory, which a group allocates together; they stay, and grow. There are
two sets in turn: the operator begins with a barrier of the group and ends when a rank has read what
is its own, so the buffers of one call may be written again once the next has passed its barrier.
Rows are copied in and out, which costs no message and lets autograd keep what has arrived.

What the operator's kernel asserts is kept: it divides the bytes of a rank among blocks of threads
without a remainder. So rows begin at multiples of 16 bytes, and the number of blocks is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from mindspeed import device, spmd
from mindspeed.moe.row_exchange import DeviceRows
from mindspeed.moe.split_phase import InFlight
from mindspeed.spmd import V

BLOCKS = "TORCH_SYMMMEM_NBLOCKS"
"""Torch reads the number of blocks of threads of the operator here, once."""
_PER_RANK = (1, 2, 4, 8, 16)
"""Numbers of blocks of a rank that the operator's kernel serves."""
_PITCH = 16
_ARGUMENTS = ("input", "out", "in_splits", "out_splits_offsets", "group_name")
_MOST_RANKS, _MOST_BLOCKS = 512, 64


def problems(ranks: int) -> Iterator[tuple[str, str]]:
    """Why this process cannot exchange rows of ``ranks`` ranks so, and how it could."""
    if device.current().name != "cuda":
        yield (f"needs NVIDIA GPUs, and this device is {device.current().name}", "use all-to-all")
        return
    if _arguments() != _ARGUMENTS:
        yield (
            f"torch {torch.__version__} has no all_to_all_vdev({', '.join(_ARGUMENTS)})",
            "install torch 2.13, or use all-to-all",
        )
    if not symm_mem.is_nvshmem_available():
        yield (
            "torch finds no NVSHMEM (libnvshmem_host.so.3)",
            "install nvidia-nvshmem-cu13, or use all-to-all",
        )
    if ranks > _MOST_RANKS:
        yield (f"the operator serves {_MOST_RANKS} ranks, not {ranks}", "use all-to-all")
    given = os.environ.get(BLOCKS)
    served = (0, *_PER_RANK)
    if given is not None and not (given.isdigit() and int(given) // ranks in served):
        yield (
            f"{BLOCKS}={given} is not 1, 2, 4, 8 or 16 times {ranks} ranks, so the kernel of "
            "torch would end with an assertion",
            f"unset {BLOCKS}",
        )


def _arguments() -> tuple[str, ...]:
    """The names of the operator's arguments; empty: torch has no such operator."""
    operator = getattr(torch.ops.symm_mem, "all_to_all_vdev", None)
    return () if operator is None else tuple(x.name for x in operator.default._schema.arguments)


def blocks(ranks: int) -> int:
    """Blocks of threads: a power of two for each rank, which divides the bytes of every row."""
    return ranks * max(one for one in _PER_RANK if one == 1 or one * ranks <= _MOST_BLOCKS)


@dataclass(eq=False)
class SymmetricMemory:
    """The exchange, and the buffers of its groups.

    Attributes:
        buffers: two sets by name of the group, the one to be taken next first.
    """

    buffers: dict[str, list[_Buffers]] = field(default_factory=dict)
    _stream: Any = None

    def padding(self, rows: torch.Tensor, bound: int) -> torch.Tensor:
        """None, for ``rows [R]``."""
        return torch.zeros_like(rows)

    def send_length(self, bound: int, ranks: int, most: int) -> int:
        """No more than a rank has."""
        return min(ranks * bound, most)

    def collective(self, rows: DeviceRows) -> DeviceAllToAll:
        """The exchange of some rows."""
        return DeviceAllToAll(self, rows)

    def exchange(self, x: torch.Tensor, rows: DeviceRows) -> tuple[torch.Tensor, InFlight | None]:
        """Start to move rows; on a stream of its own where the device has streams.

        Args:
            x: ``[send_length, ...]``, the rows for each rank one after the other.
            rows: how many they are.

        Returns:
            ``[receive_length, ...]``, behind the last row anything, and the work.
        """
        out, here = x.new_empty((rows.receive_length, *x.shape[1:])), device.current()
        if x.device.type == "cpu":
            self._run(x, rows, out)
            return out, None
        if self._stream is None:
            self._stream = here.stream()
        stream = self._stream
        stream.wait_stream(here.current_stream())
        with here.use_stream(stream):
            self._run(x, rows, out)
            event = here.event()
            event.record(stream)
        return out, _Recorded(event)

    def _run(self, x: torch.Tensor, rows: DeviceRows, out: torch.Tensor) -> None:
        columns, width = prod(x.shape[1:]), prod(x.shape[1:]) * x.itemsize
        buffers = self._next(rows.group, max(len(x), len(out)), width, x.device)
        source = buffers.of(buffers.send, len(x), width).view(x.dtype)
        target = buffers.of(buffers.receive, len(out), width).view(x.dtype)
        source[:, :columns] = x.reshape(len(x), columns)
        buffers.splits.copy_(rows.sent)
        torch.ops.symm_mem.all_to_all_vdev(
            source, target, buffers.splits, buffers.offsets, rows.group.group_name
        )
        out.view(len(out), columns).copy_(target[:, :columns])

    def _next(
        self, group: dist.ProcessGroup, rows: int, width: int, where: torch.device
    ) -> _Buffers:
        """The set that was not taken last, large enough; collective where it grows."""
        sets = self.buffers.setdefault(group.group_name, [_Buffers(), _Buffers()])
        taken, other = sets
        sets[:] = other, taken
        taken.reserve(group, rows * _pitch(width), where)
        return taken


@dataclass(eq=False)
class _Buffers:
    """Symmetric memory for one call."""

    send: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    receive: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    splits: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    offsets: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def reserve(self, group: dist.ProcessGroup, size: int, where: torch.device) -> None:
        """Allocate at least ``size`` bytes for rows each way; the same size on all ranks."""
        if size <= self.send.numel():
            return
        ranks = group.size()
        device.current().synchronize()  # nobody reads the buffers that are given back
        os.environ.setdefault(BLOCKS, str(blocks(ranks)))
        symm_mem.set_backend("NVSHMEM")
        self.send, self.receive = (
            symm_mem.empty(size, dtype=torch.uint8, device=where) for _ in range(2)
        )
        self.splits = symm_mem.empty(ranks, dtype=torch.int64, device=where)
        self.offsets = symm_mem.empty((2, ranks), dtype=torch.int64, device=where)
        for one in (self.send, self.receive, self.splits, self.offsets):
            symm_mem.rendezvous(one, group)

    def of(self, buffer: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """The beginning of a ``buffer [bytes]`` for rows of ``width`` bytes: ``[rows, pitch]``."""
        pitch = _pitch(width)
        return buffer[: rows * pitch].view(rows, pitch)


def _pitch(width: int) -> int:
    return -(-width // _PITCH) * _PITCH


@dataclass(frozen=True)
class DeviceAllToAll:
    """Rows to all ranks by sizes on the device; the reverse brings the gradients back."""

    memory: SymmetricMemory
    moved: DeviceRows

    def typed(self) -> spmd.Collective:
        """Rule for :mod:`mindspeed.spmd`."""
        return spmd.Collective(V, V, group=lambda given: self.moved.group)

    def rows(self, rows: int) -> int:
        """Rows of the result for ``rows`` rows."""
        return self.moved.receive_length

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Send ``x [send_length, ...]``; the result is ``[receive_length, ...]``."""
        return self.memory.exchange(x, self.moved)

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Send ``grad [receive_length, ...]``; the result is ``[send_length, ...]``."""
        return self.memory.exchange(grad, self.moved.back())


@dataclass(frozen=True)
class _Recorded:
    """Work that has ended when a stream reaches an event."""

    event: Any

    def wait(self) -> None:
        device.current().current_stream().wait_event(self.event)
