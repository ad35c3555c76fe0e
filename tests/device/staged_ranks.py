"""Collectives of a staged group next to those of the group that it is made of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed.device import track_memory
from mindspeed.device.staged_group import staged
from mindspeed.instruments import CommLedger

SLICE = 4
INPUTS = {
    "not a multiple": lambda rank: torch.arange(11.0) + 100 * rank,
    "one slice": lambda rank: torch.arange(3.0) - rank,
    "strided": lambda rank: (torch.arange(24.0).view(4, 6) + rank)[:, ::2].t(),
    "one element": lambda rank: torch.tensor([7.0 * rank]),
    "empty": lambda rank: torch.empty(0),
    "bf16": lambda rank: torch.arange(9, dtype=torch.bfloat16) * (rank + 1),
    "int64": lambda rank: torch.arange(5) + 2**40 * rank,
}


def equal_to_the_inner_group() -> dict[str, dict[str, bool]]:
    """Whether gather, scatter and broadcast give what the inner group gives, for every root."""
    group = dist.new_group(list(range(dist.get_world_size())))
    other = staged(group, SLICE)
    found: dict[str, dict[str, bool]] = {}
    for name, make in INPUTS.items():
        found[name] = {}
        for root in range(dist.get_world_size()):
            for operation in (_gather, _scatter, _broadcast):
                ours, truth = (operation(make, root, one) for one in (other, group))
                same = all(map(torch.equal, ours, truth))
                found[name][f"{operation.__name__} {root}"] = same and len(ours) == len(truth)
    dist.barrier(other)
    objects = [{"rank": dist.get_rank()}]
    dist.broadcast_object_list(objects, 0, other)
    found["object"] = {"broadcast": objects == [{"rank": 0}]}
    return found


def _gather(make: Any, root: int, group: Any) -> list[torch.Tensor]:
    rank = dist.get_rank()
    mine = make(rank)
    outputs = [torch.zeros_like(mine).contiguous() for _ in range(group.size())]
    dist.gather(mine.contiguous(), outputs if rank == root else None, root, group)
    return outputs if rank == root else []


def _scatter(make: Any, root: int, group: Any) -> list[torch.Tensor]:
    rank = dist.get_rank()
    inputs = [make(r).contiguous() for r in range(group.size())]
    out = torch.zeros_like(inputs[0])
    dist.scatter(out, inputs if rank == root else None, root, group)
    return [out]


def _broadcast(make: Any, root: int, group: Any) -> list[torch.Tensor]:
    x = make(dist.get_rank()).contiguous()
    dist.broadcast(x, root, group)
    return [x]


def costs(numel: int, slice_size: int) -> dict[str, dict[str, int]]:
    """Calls of the inner group and bytes of device memory of a gather and a scatter to rank 0."""
    group = dist.new_group(list(range(dist.get_world_size())))
    other, rank = staged(group, slice_size), dist.get_rank()
    mine = torch.arange(float(numel)) + rank
    parts = [torch.zeros(numel) for _ in range(group.size())] if rank == 0 else None
    found = {}
    for name, call in {
        "gather": lambda: dist.gather(mine, parts, 0, other),
        "scatter": lambda: dist.scatter(mine, parts, 0, other),
    }.items():
        with track_memory([mine, *(parts or [])]) as memory, CommLedger() as ledger:
            before = memory.current
            call()
        found[name] = {
            "calls": ledger.calls(name, group=group),
            "others": ledger.calls() - ledger.calls(name, group=group),
            "staged": memory.peak - before,
        }
    return found


def refused() -> str:
    """What a slice of nothing is told."""
    try:
        staged(dist.group.WORLD, 0)
    except ValueError as error:
        return str(error)
    return ""
