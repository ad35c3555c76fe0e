"""Jobs for the ranks of test_uneven.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.journal import Journal


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
