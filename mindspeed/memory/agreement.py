"""Ranks that communicate inside a layer need the same plan, so they compare costs and choices.

Each function is a collective of every group given, in that order; a rank may be in several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.errors import TrainingError


def largest(values: Sequence[int], groups: Sequence[Any], device: torch.device) -> list[int]:
    """The largest of each value over the ranks of all groups; all-reduces 8 bytes a value."""
    if _planned():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    for group in groups:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def refuse_different(digest: str, groups: Sequence[Any], device: torch.device, what: str) -> None:
    """Raise on every rank of a group in which digests differ; all-gathers 32 bytes a rank.

    Args:
        digest: hexadecimal SHA-256.
        groups: the process groups.
        device: of the collective's tensors.
        what: names it in the message.

    Raises:
        TrainingError: names the ranks that have another digest than the group's first.
    """
    if _planned():
        return
    own = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=device)
    for group in groups:
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, own, group=group)
        ranks = dist.get_process_group_ranks(group)
        other = [rank for rank, one in zip(ranks, found, strict=True) if not one.equal(found[0])]
        if other:
            raise TrainingError(
                f"{what} of ranks {', '.join(map(str, other))} differs from that of rank "
                f"{ranks[0]}, with which they communicate inside layers: start all ranks with the "
                "same flags and versions"
            )


def _planned() -> bool:
    """Whether nothing is sent, because one process stands for all ranks of its groups."""
    return dist.is_initialized() and dist.get_backend() == "fake"
