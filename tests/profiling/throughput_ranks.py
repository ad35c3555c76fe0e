"""Measures steps whose work differs from rank to rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed.profiling.throughput import ThroughputMeter


def flops_of_uneven_work() -> tuple[float, float]:
    """Rank r multiplies r + 1 times [2, 3] by [3, 5]: 60 FLOPs each."""
    meter = ThroughputMeter(lambda: 0)
    with meter.step(1):
        for _ in range(dist.get_rank() + 1):
            torch.ones(2, 3) @ torch.ones(3, 5)
    found = meter.read()
    return found.without_recompute, found.with_recompute
