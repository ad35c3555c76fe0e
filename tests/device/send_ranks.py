"""Jobs for the ranks of test_sends.py and test_uneven.py."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed import device
from mindspeed.journal import Journal


def send_freed_tensor(installed: bool) -> bool | list[float]:
    """Rank 0 sends ones asynchronously and frees the tensor as Megatron's pipeline does.

    Returns:
        On rank 0 whether the memory being sent was freed before the send was complete, on rank 1
        what it received.
    """
    if installed:
        device.install(Journal())
    if dist.get_rank() == 0:
        tensor = torch.ones(1024)
        memory = StorageWeakRef(tensor.untyped_storage())
        request = dist.isend(tensor, 1)
        tensor.data = torch.empty(1)
        freed = memory.expired()
        request.wait()
        return freed
    time.sleep(0.2)  # the receiver is late: the send is not complete yet
    received = torch.zeros(1024)
    dist.irecv(received, 0).wait()
    return [received.min().item(), received.max().item()]


def gather_and_scatter_uneven_parts(dtype: torch.dtype) -> list[torch.Tensor]:
    """Rank r owns r + 1 rows: all ranks gather all rows, and reduce them back to their owners."""
    device.install(Journal())
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.full((rank + 1, 3), float(rank), dtype=dtype)
    parts = [torch.empty(r + 1, 3, dtype=dtype) for r in range(size)]
    dist.all_gather(parts, own, async_op=True).wait()
    gathered = torch.cat(parts)
    summed, averaged = torch.empty_like(own), torch.empty_like(own)
    dist.reduce_scatter(summed, [part + rank for part in parts])
    dist.reduce_scatter(averaged, parts, op=dist.ReduceOp.AVG, async_op=True).wait()
    return [gathered, summed, averaged]
