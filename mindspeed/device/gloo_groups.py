"""The end of process groups with gloo, which torch 2.7 may lock up.

The last reference to a group joins gloo's threads. torch 2.7 holds the interpreter meanwhile, and a
thread that still has the tensor of the last collective waits for the interpreter to drop it. The
class of gloo's backend itself lets the interpreter go, so its last reference is made the last one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mindspeed.device import torch_versions
from mindspeed.journal import Journal


def install(journal: Journal) -> None:
    """Let destroyed groups end before their backends, where torch does not see to it."""
    if torch_versions.gloo_groups_end_alone():
        return
    value = _destroy(distributed_c10d.destroy_process_group)
    for holder in (distributed_c10d, dist):
        journal.set(holder, "destroy_process_group", value, owner="device")


def _destroy(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        known = distributed_c10d._world.pg_map
        for ending in [*known] if group in (None, dist.group.WORLD) else [group]:
            if ending in known:
                backends = [ending._get_backend(device) for device in ending._device_types]
                weakref.finalize(ending, backends.clear).atexit = False
        original(group)

    return destroy_process_group
