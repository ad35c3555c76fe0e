"""What differs between releases of torch, and the oldest that trains.

Most of what newer torch gives is asked for where it is used, by ``hasattr``, with a fallback beside
it. Here is what an attribute does not tell. ``tools/torch_versions.py`` measures the releases.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed import distributed_c10d

from mindspeed.journal import Journal

OLDEST = "2.7"
"""The oldest release that trains; also the lower bound in pyproject.toml."""

TESTED = "2.13.0"
"""The release of constraints.txt."""

_HERE = Version(Version(torch.__version__).base_version)


_version = functools.cache(Version)  # functions of every step ask


def at_least(release: str) -> bool:
    """Whether this torch is ``release`` or newer; development builds count as their release."""
    return _version(release) <= _HERE


def libuv_store_takes_a_socket() -> bool:
    """Whether a ``TCPStore`` on libuv serves a socket that is open already."""
    return at_least("2.8")


def allocator_variables(device: str) -> tuple[str, ...]:
    """The environment variables that a device's caching allocator reads, newest first."""
    common = "2.13" if device == "npu" else "2.9"
    named = f"PYTORCH_{device.upper()}_ALLOC_CONF"
    return ("PYTORCH_ALLOC_CONF", named) if at_least(common) else (named,)


def gloo_reduces_all() -> bool:
    """Whether gloo reduces by ``AVG``, reduces lists and takes complex numbers.

    Older releases also sum whatever the operation is in ``reduce_scatter_tensor``.
    """
    return at_least("2.9")


def gloo_exchanges_lists() -> bool:
    """Whether gloo has ``all_to_all`` of lists.

    torch 2.11 has not.
    """
    return at_least("2.12")


def gloo_groups_end_alone() -> bool:
    """Whether the end of a process group lets gloo's threads have the interpreter.

    Older releases wait for these threads, which may wait for the interpreter to drop a tensor.
    """
    return at_least("2.8")


def cpu_attention_groups_heads() -> bool:
    """Whether the CPU's flash kernel takes fewer heads of keys than of queries.

    Older releases read past the end of keys and values.
    """
    return at_least("2.9")


def saving_keeps_tensors() -> bool:
    """Whether ``torch.save`` keeps what it has saved until garbage is collected."""
    return not at_least("2.10")


def fused_adam_takes_several_meshes() -> bool:
    """Whether one fused Adam updates DTensors of several device meshes."""
    return at_least("2.9")


def groups_in_a_name() -> int:
    """The number in the name of the next process group that only its own ranks make.

    Older releases count the groups that this process is in, newer ones those that it took part in
    making.
    """
    world = distributed_c10d._world
    return world.group_count if at_least("2.14") else len(world.pg_names)


def let_groups_end(journal: Journal) -> None:
    """Let destroyed groups of gloo end before their backends; torch 2.7 may lock up otherwise.

    The last reference to a group joins gloo's threads. torch 2.7 holds the interpreter meanwhile,
    and a thread that still has the tensor of the last collective waits for the interpreter to drop
    it. The class of gloo's backend itself lets the interpreter go, so its last reference is made
    the last one.
    """
    if gloo_groups_end_alone():
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
