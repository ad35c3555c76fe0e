"""Process groups and device meshes for CUDA, created on gloo.

Process groups requested with ``nccl`` or ``hccl`` (or ``cpu:gloo,cuda:nccl``) become gloo groups;
arguments that only concern accelerators (``device_id``, ``pg_options``, ``device_ids``) are
dropped; ``split_group`` creates new groups. ``get_backend`` returns gloo. Options of NCCL can be
constructed (``ProcessGroupNCCL.Options``, for ``--high-priority-stream-groups`` and
``--nccl-communicator-config-path``) and are dropped as well.

gloo connects lazily (``TORCH_GLOO_LAZY_INIT=1``, unless the variable is set): a model-parallel
layout has dozens of groups, most of which never communicate with most of their members.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from mindspeed.device import torch_versions
from mindspeed.device.torch_cuda_shim.factories import on_host
from mindspeed.journal import Journal

_ACCELERATOR_BACKENDS = ("nccl", "hccl", "ucc", "xccl")


class ProcessGroupNCCL:
    """Stands for the class that a torch without CUDA lacks; only its options are used."""

    class Options:
        """Accepts every option of NCCL; the groups are gloo's, which have none of them."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()


def gloo(backend: Any) -> Any:
    """``"gloo"`` for every spelling of an accelerator's backend; others unchanged."""
    if backend is None:
        return None
    parts = [part.rpartition(":")[2] for part in str(backend).lower().split(",")]
    if any(part in _ACCELERATOR_BACKENDS for part in parts):
        return "gloo"
    return backend


def _init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return original(gloo(backend) or "gloo", *args, **kwargs)

    return init_process_group


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("backend_options", None)
        return original(ranks, timeout, gloo(backend), None, *args, **kwargs)

    return new_group


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group, async_op)

    return barrier


def _split_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def split_group(
        parent_pg: Any = None,
        split_ranks: list[list[int]] | None = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: Any = None,
    ) -> Any:
        if not split_ranks:
            raise ValueError("split_ranks must name at least one list of ranks")
        parent = dist.get_process_group_ranks(parent_pg or dist.group.WORLD)
        for ranks in split_ranks:
            members = sorted(parent[rank] for rank in ranks)
            if dist.get_rank() in members:
                return dist.new_group(
                    members,
                    timeout=timeout,
                    backend=backend,
                    use_local_synchronization=True,
                    group_desc=group_desc,
                )
        return None

    return split_group


@contextlib.contextmanager
def coalescing_manager(
    group: Any = None, device: Any = None, async_ops: bool = False
) -> Iterator[Any]:
    """Collect the collectives of the body and start all of them at its end.

    Unlike torch's own manager on gloo this one takes any mix of collectives, and an exception in
    the body leaves nothing behind.
    """
    group = group or dist.group.WORLD
    collecting = distributed_c10d._world.pg_coalesce_state
    if collecting.get(group):
        raise ValueError("a coalescing manager is already open for this process group")
    collecting[group] = []
    manager = distributed_c10d._CoalescingManager()
    try:
        yield manager
    except BaseException:
        collecting.pop(group, None)
        raise
    for call in collecting.pop(group):
        manager.append(_start(call, group))
    if not async_ops:
        manager.wait()


def _start(call: Any, group: Any) -> Any:
    """Issue one collected collective asynchronously."""
    tensors = [tensor for tensor in (call.dst_tensor, call.tensor) if tensor is not None]
    reduction = {} if call.redop is None else {"op": call.redop}
    return call.op(*tensors, group=group, async_op=True, **reduction)


def _mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def with_host_mesh(first: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(first, str):  # init_device_mesh(device_type, ...)
            return original(_mesh_device(first), *args, **kwargs)
        args = (_mesh_device(args[0]), *args[1:]) if args else args
        if "device_type" in kwargs:
            kwargs["device_type"] = _mesh_device(kwargs["device_type"])
        return original(first, *args, **kwargs)

    return with_host_mesh


def _mesh_device(device: Any) -> str:
    host = on_host(device)
    return host.type if isinstance(host, torch.device) else host


def install(journal: Journal) -> None:
    """Route process groups and device meshes to gloo."""
    torch_versions.let_groups_end(journal)
    if not hasattr(dist, "ProcessGroupNCCL"):
        journal.set(dist, "ProcessGroupNCCL", ProcessGroupNCCL, owner="device")
    for name, wrapper in (
        ("init_process_group", _init_process_group),
        ("new_group", _new_group),
        ("_new_group_with_tag", _new_group),
        ("split_group", _split_group),
        ("barrier", _barrier),
        ("_coalescing_manager", lambda _: coalescing_manager),
    ):
        value = wrapper(getattr(distributed_c10d, name))
        for holder in (distributed_c10d, dist):
            if name in vars(holder):
                journal.set(holder, name, value, owner="device")
    mesh = device_mesh.DeviceMesh
    journal.set(mesh, "__init__", _mesh(mesh.__init__), owner="device")
    journal.set(mesh, "from_group", staticmethod(_mesh(mesh.from_group)), owner="device")
    init_mesh = _mesh(device_mesh.init_device_mesh)
    for holder in (device_mesh, dist):
        journal.set(holder, "init_device_mesh", init_mesh, owner="device")
    if "TORCH_GLOO_LAZY_INIT" not in os.environ:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        journal.call_on_undo(lambda: os.environ.pop("TORCH_GLOO_LAZY_INIT", None))
