"""Faults below ``torch.distributed``'s functions: what a rank gets is not what was sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.compare.planting import around, function, recomputing

_inside = [False]


def _after(name: str, change: Callable[[torch.Tensor], None], chosen: Callable[[], bool]) -> None:
    """Change what a method of process groups has written, once its handle is waited for."""
    wait, call = dist.Work.wait, getattr(dist.ProcessGroup, name)
    written: dict[Any, list[torch.Tensor]] = {}

    def changed_call(group: Any, tensors: Any, *args: Any) -> Any:
        work = call(group, tensors, *args)
        if chosen():
            written[work] = tensors
        return work

    def changed_wait(work: Any, *args: Any) -> Any:
        result = wait(work, *args)
        for x in written.pop(work, ()):
            change(x.detach())
        return result

    setattr(dist.ProcessGroup, name, changed_call)
    dist.Work.wait = changed_wait


def rolled() -> None:
    """A receiver whose rows are one further than the sender's."""
    _after("recv", lambda x: x.copy_(x.roll(1, 0)), lambda: dist.get_rank() == 1)


def flipped_on_one_rank() -> None:
    """The last rank has one bit of a sum other than the other ranks."""

    def flip(x: torch.Tensor) -> None:
        x.view(-1)[7:8].view(torch.int32).bitwise_xor_(1 << 28)

    _after("allreduce", flip, lambda: _inside[0] and dist.get_rank() == 1)


def during(path: str) -> Any:
    """Lets a fault know that a module's first forward runs."""

    def changed(forward: Any, *args: Any, **kwargs: Any) -> Any:
        _inside[0] = not recomputing()
        try:
            return forward(*args, **kwargs)
        finally:
            _inside[0] = False

    return around(path, changed)


def left_out(path: str) -> Any:
    """A row-parallel layer without its all-reduce, on all ranks."""
    notes = during(path)
    swap = function(
        "megatron.core.tensor_parallel.layers",
        "reduce_from_tensor_model_parallel_region",
        lambda right: lambda x, *args, **kwargs: x if _inside[0] else right(x, *args, **kwargs),
    )

    def plant(chunk: Any, rank: int) -> None:
        notes(chunk, rank)
        swap(chunk, rank)

    return plant
