"""The functions of ``torch.cuda`` that Megatron calls, implemented for the CPU.

Three kinds:

* predicates that other libraries branch on (``is_available``, ``device_count``, ``is_initialized``,
  ``is_bf16_supported``) are true for Megatron only;
* everything that raises or is empty without a GPU (streams, events, memory statistics, random
  states, nvtx, properties) works for all callers;
* what a CPU cannot do (capturing graphs, memory pools) raises an error that names the flag to
  remove.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from mindspeed.device import host_memory
from mindspeed.device.torch_cuda_shim import memory, rng, streams
from mindspeed.device.torch_cuda_shim.callers import called_by_megatron
from mindspeed.journal import Journal

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
        cudaMemGetInfo=memory.mem_get_info,
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
    "device_memory_used": memory.memory_allocated,
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
    **memory.FUNCTIONS,
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
