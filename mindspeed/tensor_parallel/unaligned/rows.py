"""Collectives of rows that the ranks share unevenly: ``[n_0 + n_1 + ..., ...]``.

torch_npu has them; elsewhere every part is padded to the largest inside the collective. With
c = max(sizes) rows of B bytes on p ranks, gathering and reduce-scattering each send and receive
``(p - 1) c B`` bytes per rank; an all-reduce of which each rank takes its part would be twice that.
Rows of padding are zero or never read, so sums of integers are exact.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class _Then:
    """The handle of a collective; what it received is put in place once it is complete."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> bool:
        """Wait as ``torch.distributed.Work.wait`` does; a second call does nothing."""
        if self._finish is not None:
            self._work.wait()
            self._finish()
            self._finish = None  # and the buffers that it holds
        return True

    def is_completed(self) -> bool:
        """Whether the collective is complete; the rows are in place after :meth:`wait`."""
        return bool(self._work.is_completed())


def gather_rows(
    x: torch.Tensor, sizes: Sequence[int], group: Any, async_op: bool = False
) -> tuple[torch.Tensor, Any]:
    """All-gather the rows of all ranks.

    Args:
        x: ``[sizes[rank], ...]``, any dtype.
        sizes: rows of each rank.
        group: the ranks.
        async_op: return at once.

    Returns:
        ``[sum(sizes), ...]`` in the dtype of x, complete after ``wait()`` of the handle; and the
        handle, None unless ``async_op``.

    Raises:
        ValueError: x has another number of rows.
    """
    _check(x, sizes[group.rank()], f"rank {group.rank()} of")
    out = x.new_empty((sum(sizes), *x.shape[1:]))
    native = _native(x, group)
    if native is not None:
        work = native.all_gather_into_tensor_uneven(
            out, x.contiguous(), list(sizes), group=group, async_op=async_op
        )
        return out, work if async_op else None
    rows = max(sizes)
    padded = x.new_empty((len(sizes) * rows, *x.shape[1:]))
    work = dist.all_gather_into_tensor(padded, _padded(x, rows), group=group, async_op=async_op)

    def compact() -> None:
        for whole, size, into in zip(
            padded.split(rows), sizes, out.split(list(sizes)), strict=True
        ):
            into.copy_(whole[:size])

    if async_op:
        return out, _Then(work, compact)
    compact()
    return out, None


def scatter_rows(
    x: torch.Tensor, sizes: Sequence[int], group: Any, async_op: bool = False
) -> tuple[torch.Tensor, Any]:
    """Sum rows over all ranks and return this rank's part.

    Args:
        x: ``[sum(sizes), ...]``, any dtype that the backend adds.
        sizes: rows of each rank.
        group: the ranks.
        async_op: return at once.

    Returns:
        ``[sizes[rank], ...]`` in the dtype of x, complete after ``wait()`` of the handle; and the
        handle, None unless ``async_op``.

    Raises:
        ValueError: x has another number of rows.
    """
    _check(x, sum(sizes), "all ranks of")
    size = sizes[group.rank()]
    native = _native(x, group)
    if native is not None:
        shard = x.new_empty((size, *x.shape[1:]))
        work = native.reduce_scatter_tensor_uneven(
            shard, x.contiguous(), list(sizes), group=group, async_op=async_op
        )
        return shard, work if async_op else None
    rows = max(sizes)
    parts = [_padded(part, rows) for part in x.split(list(sizes))]
    shard = x.new_empty((rows, *x.shape[1:]))
    work = dist.reduce_scatter_tensor(shard, torch.cat(parts), group=group, async_op=async_op)
    return shard[:size], work if async_op else None


def padded_index(sizes: Sequence[int]) -> list[int]:
    """Rows of ``[sum(sizes), ...]`` with which every rank has the largest number of rows.

    ``[3, 2]`` gives ``[0, 1, 2, 3, 4, 0]``: rank 1 has rows 3 and 4, and row 0 as padding.
    """
    rows, index, first = max(sizes), [], 0
    for size in sizes:
        index += [*range(first, first + size), *[0] * (rows - size)]
        first += size
    return index


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    if x.shape[0] == rows:
        return x.contiguous()
    return torch.cat([x, x.new_zeros((rows - x.shape[0], *x.shape[1:]))])


def _check(x: torch.Tensor, rows: int, whose: str) -> None:
    if x.shape[0] != rows:
        raise ValueError(
            f"--unaligned-linear: {x.shape[0]} rows, where {whose} the group should have {rows}; "
            "every micro-batch must have --seq-length tokens"
        )


def _native(x: torch.Tensor, group: Any) -> Any:
    """torch_npu's collectives of uneven rows, which work within one machine; else None."""
    if x.device.type != "npu":
        return None
    collectives = sys.modules["torch_npu"].distributed
    names = ("all_gather_into_tensor_uneven", "reduce_scatter_tensor_uneven")
    on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    machines = {rank // on_machine for rank in dist.get_process_group_ranks(group)}
    return (
        collectives if all(hasattr(collectives, n) for n in names) and len(machines) == 1 else None
    )
