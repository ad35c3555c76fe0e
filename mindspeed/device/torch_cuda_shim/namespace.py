"""The functions of ``torch.cuda`` that Megatron calls, implemented for the CPU.

Four kinds:

* predicates that other libraries branch on (``is_available``, ``device_count``, ``is_initialized``,
  ``is_bf16_supported``) are true for Megatron only;
* everything that raises or is empty without a GPU (streams, events, memory statistics, random
  states, nvtx, properties) works for all callers;
* memory statistics come from host memory: resident set and its peak of the whole process, or inside
  :func:`mindspeed.device.track_memory` exact bytes of live tensor storages;
* what a CPU cannot do (capturing graphs, memory pools) raises an error that names the flag to
  remove.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from mindspeed.device import host_memory, tracker
from mindspeed.device.torch_cuda_shim import rng, streams
from mindspeed.device.torch_cuda_shim.callers import called_by_megatron
from mindspeed.journal import Journal


def memory_allocated(device: Any = None) -> int:
    """Bytes in use now."""
    active = tracker.active()
    return active.current if active else host_memory.resident()


def max_memory_allocated(device: Any = None) -> int:
    """Most bytes in use since the last reset."""
    active = tracker.active()
    return active.peak if active else host_memory.peak_resident()


def memory_reserved(device: Any = None) -> int:
    """Bytes taken from the operating system now."""
    return max(memory_allocated(), host_memory.resident())


def max_memory_reserved(device: Any = None) -> int:
    """Most bytes taken from the operating system since the last reset."""
    return max(max_memory_allocated(), host_memory.peak_resident())


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start new peaks."""
    active = tracker.active()
    if active:
        active.reset_peak()
    host_memory.reset_peak()


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Totals are not kept: nothing to reset."""


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(available, total) bytes."""
    return host_memory.available(), host_memory.total()


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """The caching allocator's keys; counters that a CPU has not are 0."""
    allocated, peak = memory_allocated(), max_memory_allocated()
    reserved, reserved_peak = memory_reserved(), max_memory_reserved()
    active = tracker.active()
    blocks, blocks_peak = (active.storages, active.peak_storages) if active else (0, 0)
    values = {
        "allocated_bytes": (allocated, peak),
        "active_bytes": (allocated, peak),
        "requested_bytes": (allocated, peak),
        "reserved_bytes": (reserved, reserved_peak),
        "inactive_split_bytes": (0, 0),
        "allocation": (blocks, blocks_peak),
        "active": (blocks, blocks_peak),
        "segment": (0, 0),
        "inactive_split": (0, 0),
    }
    stats: OrderedDict[str, int] = OrderedDict()
    for name, (current, most) in values.items():
        for pool in ("all", "small_pool", "large_pool"):
            stats[f"{name}.{pool}.current"] = 0 if pool == "small_pool" else current
            stats[f"{name}.{pool}.peak"] = 0 if pool == "small_pool" else most
            stats[f"{name}.{pool}.allocated"] = 0
            stats[f"{name}.{pool}.freed"] = 0
    for name in ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc"):
        stats[name] = 0
    stats["num_device_free"] = 0
    stats["max_split_size"] = -1
    return stats


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """:func:`memory_stats` with one level of dictionaries per dot."""
    tree: dict[str, Any] = {}
    for key, value in memory_stats().items():
        *path, leaf = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return tree


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Three lines for people."""
    mib = 1 << 20
    return (
        f"memory of this process on the CPU: {memory_allocated() / mib:.1f} MiB allocated\n"
        f"peak: {max_memory_allocated() / mib:.1f} MiB\n"
        f"resident: {host_memory.resident() / mib:.1f} MiB of {host_memory.total() / mib:.1f} MiB"
    )


def _snapshot(*_: Any, **__: Any) -> dict[str, Any]:
    return {"segments": [], "device_traces": []}


def _nothing(*_: Any, **__: Any) -> None:
    """There is no cache to empty and no history to record."""


_MEMORY_STATISTICS = {
    "memory_allocated": memory_allocated,
    "max_memory_allocated": max_memory_allocated,
    "memory_reserved": memory_reserved,
    "max_memory_reserved": max_memory_reserved,
    "memory_cached": memory_reserved,
    "max_memory_cached": max_memory_reserved,
    "reset_peak_memory_stats": reset_peak_memory_stats,
    "reset_max_memory_allocated": reset_peak_memory_stats,
    "reset_max_memory_cached": reset_peak_memory_stats,
    "reset_accumulated_memory_stats": reset_accumulated_memory_stats,
    "mem_get_info": mem_get_info,
    "memory_stats": memory_stats,
    "memory_stats_as_nested_dict": memory_stats_as_nested_dict,
    "memory_summary": memory_summary,
    "empty_cache": _nothing,
    "memory_snapshot": _snapshot,
    "_snapshot": _snapshot,
    "_record_memory_history": _nothing,
    "_dump_snapshot": _nothing,
}


CAPABILITY = (8, 0)
"""Compute capability told to callers: bf16 exists, fp8 and Hopper-only kernels do not."""

_index = 0


def current_device() -> int:
    """The index last chosen with ``set_device``; all indices mean this CPU."""
    return _index


def set_device(device: Any) -> None:
    """Remember an index."""
    global _index
    if not isinstance(device, int):
        device = torch.device(device).index
    if device is not None and device >= 0:
        _index = device


def local_devices() -> int:
    """Number of devices that this host reports: one per process of this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def properties(device: Any = None) -> SimpleNamespace:
    """Result of ``torch.cuda.get_device_properties``."""
    return SimpleNamespace(
        name="cpu",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=host_memory.total(),
        multi_processor_count=os.cpu_count() or 1,
        max_threads_per_multi_processor=1,
        regs_per_multiprocessor=0,
        shared_memory_per_block=0,
        shared_memory_per_multiprocessor=0,
        L2_cache_size=0,
        warp_size=1,
        is_integrated=1,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid="cpu",
    )


class _DeviceGuard(contextlib.nullcontext):  # type: ignore[type-arg]
    """``torch.cuda.device(i)``: there is one device, so nothing changes."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()


def _unavailable(name: str, remedy: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"torch.cuda.{name} needs an NVIDIA GPU. {remedy}")

    return refuse


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _call(callback: Callable[[], Any], **_: Any) -> Any:
    return callback()


def _cudart() -> SimpleNamespace:
    success = _constant(0)
    return SimpleNamespace(
        cudaProfilerStart=success,
        cudaProfilerStop=success,
        cudaHostRegister=success,
        cudaHostUnregister=success,
        cudaMemGetInfo=mem_get_info,
    )


class _MemPool:
    """A class, so that it can be named in annotations; no pool can be made."""

    def __new__(cls, *_: Any, **__: Any) -> _MemPool:
        return _unavailable("MemPool", _NO_POOL)()  # type: ignore[no-any-return]


_NO_POOL = "Remove --use-nccl-ub and every other option that needs a CUDA memory pool."

FUNCTIONS: dict[str, Any] = {
    "current_device": current_device,
    "set_device": set_device,
    "device": _DeviceGuard,
    "device_of": _DeviceGuard,
    "init": _constant(None),
    "_lazy_init": _constant(None),
    "_lazy_call": _call,
    "synchronize": _constant(None),
    "ipc_collect": _constant(None),
    "_sleep": _constant(None),
    "get_device_capability": _constant(CAPABILITY),
    "get_device_name": _constant("cpu"),
    "get_device_properties": properties,
    "can_device_access_peer": _constant(False),
    "check_error": _constant(None),
    "cudart": _cudart,
    "utilization": _constant(0),
    "memory_usage": _constant(0),
    "temperature": _constant(0),
    "power_draw": _constant(0),
    "clock_rate": _constant(0),
    "device_memory_used": memory_allocated,
    "default_generators": rng.DefaultGenerators(),
    "is_current_stream_capturing": _constant(False),
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "set_stream": streams.set_stream,
    "stream": streams.stream,
    "get_stream_from_external": streams.ExternalStream,
    "Stream": streams.Stream,
    "ExternalStream": streams.ExternalStream,
    "StreamContext": streams.StreamContext,
    "Event": streams.Event,
    "CUDAGraph": streams.CUDAGraph,
    "graph": streams.graph,
    "graph_pool_handle": streams.graph_pool_handle,
    "make_graphed_callables": streams.make_graphed_callables,
    "MemPool": _MemPool,
    "use_mem_pool": _unavailable("use_mem_pool", _NO_POOL),
    "caching_allocator_alloc": _unavailable("caching_allocator_alloc", _NO_POOL),
    "caching_allocator_delete": _unavailable("caching_allocator_delete", _NO_POOL),
    **rng.FUNCTIONS,
    **_MEMORY_STATISTICS,
}

_SAME_NAME_IN = ("random", "memory", "streams", "graphs")


def _answering_megatron(
    truth: Callable[..., Any], answer: Callable[..., Any]
) -> Callable[..., Any]:
    def asked(*args: Any, **kwargs: Any) -> Any:
        if called_by_megatron(sys._getframe(1).f_globals):
            return answer(*args, **kwargs)
        return truth(*args, **kwargs)

    asked.__name__ = truth.__name__
    asked.__doc__ = truth.__doc__
    return asked


def install(journal: Journal) -> None:
    """Fill ``torch.cuda`` for a process that computes on the CPU."""
    cuda = torch.cuda

    def put(holder: Any, name: str, value: Any) -> None:
        journal.set(holder, name, value, owner="device")

    for name, value in FUNCTIONS.items():
        put(cuda, name, value)
        for module in (getattr(cuda, part) for part in _SAME_NAME_IN):
            if name in vars(module):
                put(module, name, value)
    yes = _constant(True)
    for name, answer in (
        ("is_available", yes),
        ("is_initialized", yes),
        ("is_bf16_supported", yes),
        ("device_count", local_devices),
    ):
        put(cuda, name, _answering_megatron(getattr(cuda, name), answer))
    put(cuda.nccl, "version", _constant((0, 0, 0)))
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        put(cuda.nvtx, name, _constant(None))
    put(cuda.nvtx, "range", lambda *_, **__: contextlib.nullcontext())
