"""Newton-Schulz of a matrix that two ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed.te.muon import newton_schulz, newton_schulz_tp


def errors(dim: int, mode: str) -> float:
    """Largest difference between this rank's shard and that of the whole matrix."""
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(2)
    whole = torch.randn(24, 40)
    group, rank = dist.group.WORLD, dist.get_rank()
    shard = newton_schulz_tp(whole.chunk(2, dim)[rank], 5, "quintic", group, dim, mode)
    return (shard - newton_schulz(whole, 5).chunk(2, dim)[rank]).abs().max().item()
