"""A shim for ``torch.cuda`` on an NPU: torch_npu's transfer layer, completed.

``torch_npu.contrib.transfer_to_npu`` maps torch.cuda, device arguments, process groups and more to
the NPU, and is maintained with torch_npu. This module adds only

* the type strings that Megatron compares (``torch.npu.HalfTensor`` -> ``torch.cuda.HalfTensor``);
* nvtx ranges, mapped to mstx ranges;
* names of torch.cuda that torch_npu lacks (``cudart``, ``check_error``, clocks and sensors);
* a compute capability, without which torch's broadcast fails (torch_npu returns None);
* options of NCCL groups (``--high-priority-stream-groups``), replaced by the defaults of HCCL;
* all_reduce of float64, which HCCL lacks: reduced in float32;
* Megatron's torch.compile, which returns the function unchanged (``MINDSPEED_COMPILE=1`` keeps it).

torch_npu's transfer layer cannot be undone; the journal undoes what is added here.

Verified on the emulated NPU of ``tests/npu_emulator``, with each torch_npu that it runs with.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mindspeed.device import hccl_buffers, torch_versions
from mindspeed.device.torch_cuda_shim.callers import called_by_megatron
from mindspeed.device.torch_cuda_shim.compilation import compile_eagerly
from mindspeed.device.torch_cuda_shim.namespace import CAPABILITY
from mindspeed.journal import Journal


def install(journal: Journal, torch_npu: ModuleType) -> None:
    """Install torch_npu's transfer layer and complete it."""
    importlib.import_module(f"{torch_npu.__name__}.contrib.transfer_to_npu")

    torch_versions.let_groups_end(journal)

    def put(holder: Any, name: str, value: Any) -> None:
        journal.set(holder, name, value, owner="device")

    put(torch.Tensor, "type", _type(torch.Tensor.type))
    put(torch, "compile", compile_eagerly(torch.compile))
    put(torch.cuda, "get_device_capability", _capability(torch_npu))
    for name, value in _missing_names(torch_npu).items():
        if not _usable(torch.cuda, name):
            put(torch.cuda, name, value)
    for name, value in _nvtx(torch_npu).items():
        put(torch.cuda.nvtx, name, value)
    # Made with the first tensor; before 2.13 the transfer layer keeps the empty list of until then.
    torch_npu.npu._lazy_call(
        lambda: put(torch.cuda, "default_generators", torch_npu.npu.default_generators)
    )
    if not hasattr(dist, "ProcessGroupNCCL"):
        put(dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda **_: None))
    reduce = _all_reduce(distributed_c10d.all_reduce)
    for holder in (distributed_c10d, dist):
        put(holder, "all_reduce", reduce)


def process_group_options(
    torch_npu: ModuleType,
    name: str | None = None,
    buffer_mib: int | None = None,
    expansion_mode: int | None = None,
) -> Any:
    """HCCL options of a process group.

    Args:
        buffer_mib: size of the group's communication buffer.
        expansion_mode: where its collectives are expanded; 3 is on the vector cores.
    """
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    config: dict[str, Any] = {}
    if name:
        config["group_name"] = name
    if buffer_mib:
        config["hccl_buffer_size"] = buffer_mib
    if expansion_mode is not None:
        config["hccl_op_expansion_mode"] = expansion_mode
    options.hccl_config = config
    return options


def new_group_with_options(
    new_group: Callable[..., Any],
    buffers: Mapping[str, int],
    modes: Mapping[str, int],
    made: list[str | None],
) -> Callable[..., Any]:
    """``dist.new_group`` that gives Megatron's groups their own HCCL options.

    Args:
        buffers: MB by the name of a group (:mod:`mindspeed.device.hccl_buffers`).
        modes: expansion mode by the name of a group.
        made: gets the name of every group that this rank joins, None for unnamed ones.
    """

    @functools.wraps(new_group)
    def with_options(*args: Any, **kwargs: Any) -> Any:
        name = hccl_buffers.name_of(kwargs.get("group_desc"))
        chosen = buffers.get(name or ""), modes.get(name or "")
        if any(chosen) and kwargs.get("pg_options") is None and kwargs.get("backend") is None:
            options = process_group_options(importlib.import_module("torch_npu"), name, *chosen)
            kwargs["pg_options"] = options
        group = new_group(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup) and kwargs.get("backend") is None:
            made.append(name)
        return group

    return with_options


def _type(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.npu.")
        if dtype is not None:
            return method(self, dtype, *args, **kwargs)
        name = method(self)
        if called_by_megatron(sys._getframe(1).f_globals):
            return name.replace("torch.npu.", "torch.cuda.", 1)
        return name

    return type_


def _capability(torch_npu: ModuleType) -> Callable[..., Any]:
    def get_device_capability(device: Any = None) -> tuple[int, int]:
        if os.environ.get("TORCH_NPU_DEVICE_CAPABILITY"):
            return torch_npu.npu.get_device_capability(device)
        return CAPABILITY

    return get_device_capability


def _usable(module: ModuleType, name: str) -> bool:
    """Whether a name exists and does not come from a torch build without CUDA."""
    value = getattr(module, name, None)
    return value is not None and getattr(value, "__module__", "").startswith("torch_npu")


def _missing_names(torch_npu: ModuleType) -> dict[str, Any]:
    def success(*_: Any, **__: Any) -> int:
        return 0

    cudart = SimpleNamespace(
        cudaProfilerStart=success,
        cudaProfilerStop=success,
        cudaHostRegister=success,
        cudaHostUnregister=success,
    )
    return {
        "cudart": lambda: cudart,
        "check_error": lambda code: None,
        "OutOfMemoryError": torch.OutOfMemoryError,
        "clock_rate": success,
        "power_draw": success,
        "temperature": success,
        "device_memory_used": torch_npu.npu.memory_allocated,
    }


def _nvtx(torch_npu: ModuleType) -> dict[str, Any]:
    """nvtx by mstx, which is a no-op while no profiler runs.

    Its own ``range_push`` is newer than torch_npu 2.10: ranges are started and ended by number.
    """
    mstx, started = torch_npu.npu.mstx, threading.local()

    def range_push(message: str, *_: Any, **__: Any) -> int:
        ranges = vars(started).setdefault("ranges", [])
        ranges.append(mstx.range_start(message))
        return len(ranges) - 1

    def range_pop() -> int:
        ranges = vars(started).get("ranges")
        if not ranges:
            return -1
        mstx.range_end(ranges.pop())
        return len(ranges)

    @contextlib.contextmanager
    def range_(message: str, *_: Any, **__: Any) -> Iterator[None]:
        range_push(message)
        try:
            yield
        finally:
            range_pop()

    return {
        "range_push": range_push,
        "range_pop": range_pop,
        "mark": lambda message: mstx.mark(message),
        "range": range_,
    }


def _all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_reduce(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if tensor.dtype != torch.float64 or tensor.device.type != "npu":
            return original(tensor, op, group, async_op)
        narrow = tensor.float()
        work = original(narrow, op, group, async_op)
        if not async_op:
            tensor.copy_(narrow)
            return work
        return _CopyBack(work, narrow, tensor)

    return all_reduce


class _CopyBack:
    """A work handle whose ``wait`` also copies the float32 result into the float64 tensor."""

    def __init__(self, work: Any, narrow: torch.Tensor, tensor: torch.Tensor) -> None:
        self._work, self._narrow, self._tensor = work, narrow, tensor

    def wait(self, *args: Any) -> bool:
        done = self._work.wait(*args)
        self._tensor.copy_(self._narrow)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
