"""Text that one rank prints for all; before a job is joined, the rank is that of the launcher."""

from __future__ import annotations

import os


def print_rank_0(message: object) -> None:
    if _place()[0] == 0:
        print(message, flush=True)


def print_rank_last(message: object) -> None:
    rank, ranks = _place()
    if rank == ranks - 1:
        print(message, flush=True)


def _place() -> tuple[int, int]:
    import torch.distributed as dist  # features are listed without torch

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
