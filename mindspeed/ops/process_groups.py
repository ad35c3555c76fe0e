"""Process groups as operators know them: by name.

    group = resolve("0")                 # a ProcessGroup, its torch name, or its HCCL name
    torch.ops.npu.npu_mm_all_reduce_base(x1, x2, comm_name(group))

An argument of a ``torch.library`` op cannot be a ``ProcessGroup``, so the ops take the name that
torch gave it, and fused kernels of the NPU the name that HCCL gave it. Users of the original
library pass the HCCL name; all three are accepted and mean the same group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mindspeed.ops._check import ArgumentCheck

__all__ = ["comm_name", "group_name", "resolve", "tensor_parallel"]

_MEGATRON_TENSOR_PARALLEL = "TENSOR_MODEL_PARALLEL_GROUP"  # what Megatron tells new_group


def resolve(group: dist.ProcessGroup | str) -> dist.ProcessGroup:
    """The group that ``group`` is or names.

    Args:
        group: a group of this process, its torch name, or the name of its HCCL communicator.

    Raises:
        LookupError: no group of this process has this name.
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    groups = list(_groups())
    for one in groups:
        if one.group_name == group:
            return one
    for one in groups:
        backend = _hccl(one)
        # A communicator that nobody used has no name yet, and asking must not create it.
        if backend and backend.get_hccl_comm_name(dist.get_rank(), init_comm=False) == group:
            return one
    known = ", ".join(one.group_name for one in groups) or "none, torch.distributed is not set up"
    raise LookupError(f"no process group is called {group!r}; groups of this process: {known}")


def group_name(check: ArgumentCheck, **given: Any) -> str:
    """The torch name of the one group given by its argument's name; refuses everything else.

    Args:
        **given: the argument, as in ``group_name(check, hcom=hcom)``.
    """
    ((argument, group),) = given.items()
    check.require(
        isinstance(group, (str, dist.ProcessGroup)),
        argument,
        "a process group, its name, or the name of its HCCL communicator",
        group,
    )
    try:
        return resolve(group).group_name
    except LookupError as error:
        check.fail(argument, "a group that this process belongs to", error)


def comm_name(group: dist.ProcessGroup) -> str:
    """The name under which fused kernels of the NPU know the group's communicator.

    The first call creates the communicator, so all ranks call it in the same order. A group that
    has no HCCL backend (gloo, under a test) goes by its torch name.
    """
    backend = _hccl(group)
    return backend.get_hccl_comm_name(dist.get_rank()) if backend else group.group_name


def tensor_parallel() -> dist.ProcessGroup | None:
    """The newest tensor-parallel group that Megatron made, or None."""
    made = [one for one in _groups() if one.group_desc == _MEGATRON_TENSOR_PARALLEL]
    return made[-1] if made else None


def _groups() -> Iterator[dist.ProcessGroup]:
    return iter(distributed_c10d._world.pg_map)


def _hccl(group: dist.ProcessGroup) -> Any:
    """The group's backend for npu tensors if that is HCCL, else None."""
    if not hasattr(torch, "npu"):
        return None
    try:
        backend = group._get_backend(torch.device("npu"))
    except RuntimeError:  # the group has no backend for that device
        return None
    return backend if hasattr(backend, "get_hccl_comm_name") else None
