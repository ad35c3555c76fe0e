"""Defect: ``destroy_model_parallel`` drops most of its process groups without destroying them.

Where: ``megatron.core.parallel_state.destroy_model_parallel``. One ``initialize_model_parallel``
creates about forty groups.
Symptom: on gloo each group keeps its sockets and threads, so a process that initialises parallelism
repeatedly (tests, tuning, reinforcement learning) runs out of both.
Fix: destroy every group that the module's globals refer to, except the world.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mindspeed.adaptor.patch import repair
from mindspeed.device import Device


def needed_on(device: Device, te: str) -> bool:
    """Whether the host computes."""
    return device.on_host


def destroy_groups(original: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``destroy_model_parallel`` to destroy the groups that Megatron's state refers to."""

    def destroy_model_parallel() -> None:
        groups = _groups_of(original.__globals__) if dist.is_initialized() else []
        original()
        for group in groups:
            if group in dist.distributed_c10d._world.pg_map:  # Megatron destroys a few itself
                dist.destroy_process_group(group)

    return destroy_model_parallel


def _groups_of(state: dict[str, Any]) -> list[dist.ProcessGroup]:
    """The distinct groups that the module's globals hold, without the world."""
    found: dict[int, dist.ProcessGroup] = {}
    for value in list(state.values()):
        for group in value if isinstance(value, list | tuple) else [value]:
            is_group = isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD
            if is_group:
                found[id(group)] = group
    return list(found.values())


PATCHES = (
    repair(
        "megatron.core.parallel_state:destroy_model_parallel",
        destroy_groups,
        "gloo groups keep sockets and threads until they are destroyed",
        expects="()",
    ),
)
