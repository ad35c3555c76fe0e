"""torch.distributed as Megatron uses it, on gloo.

Process groups asked for with ``nccl`` or ``hccl`` (or ``cpu:gloo,cuda:nccl``) become gloo groups;
what only means something for an accelerator (``device_id``, ``pg_options``, ``device_ids``) is
dropped. ``get_backend`` stays honest.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from mindspeed.device.cuda_world.factories import on_host
from mindspeed.journal import Journal

_ACCELERATOR_BACKENDS = ("nccl", "hccl", "ucc", "xccl")


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


def _coalescing_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def coalescing_manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        return original(group, None, async_ops)

    return coalescing_manager


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if isinstance(tensor, torch.Tensor) and any(
            out.shape != tensor.shape and out.numel() == tensor.numel() for out in tensor_list
        ):
            tensor_list = [out.view(tensor.shape) for out in tensor_list]
        return original(tensor_list, tensor, group, async_op)

    return all_gather


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
    """Route process groups, collectives and device meshes to gloo."""

    def wrap(name: str, wrapper: Callable[..., Any]) -> None:
        value = wrapper(getattr(distributed_c10d, name))
        for holder in (distributed_c10d, dist):
            if name in vars(holder):
                journal.set(holder, name, value, owner="device")

    wrap("init_process_group", _init_process_group)
    wrap("new_group", _new_group)
    wrap("_new_group_with_tag", _new_group)
    wrap("barrier", _barrier)
    wrap("_coalescing_manager", _coalescing_manager)
    wrap("all_gather", _all_gather)
    mesh = device_mesh.DeviceMesh
    journal.set(mesh, "__init__", _mesh(mesh.__init__), owner="device")
    journal.set(mesh, "from_group", staticmethod(_mesh(mesh.from_group)), owner="device")
    init_mesh = _mesh(device_mesh.init_device_mesh)
    for holder in (device_mesh, dist):
        journal.set(holder, "init_device_mesh", init_mesh, owner="device")
    if "TORCH_GLOO_LAZY_INIT" not in os.environ:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        journal.call_on_undo(lambda: os.environ.pop("TORCH_GLOO_LAZY_INIT", None))
