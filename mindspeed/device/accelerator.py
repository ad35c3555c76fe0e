"""Devices with their own memory and streams, GPU and NPU: a module that mirrors ``torch.cuda``.

torch has one such module per kind of device (``torch.cuda``, ``torch.xpu``; torch_npu brings
``torch.npu``), with the same names in each. A device of another kind is a short subclass: its
name, its torch.distributed backend, what it can do, and :meth:`~Device.install`.

On an NVIDIA GPU nothing of ``torch.cuda`` is replaced. For an Ascend NPU the torch_npu module is a
parameter, so that tests can pass a mock; the names used are those of ``torch_npu.npu``.
:mod:`mindspeed.device.detect` imports torch_npu and explains why that fails without CANN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from mindspeed.device.base import Device, MemoryStats, Properties
from mindspeed.errors import ConfigError
from mindspeed.journal import Journal


class Accelerator(Device):
    """The current device of this process, by the functions of ``module``.

    Attributes:
        module: such as ``torch.cuda``.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def torch_device(self, index: int | None = None) -> torch.device:
        """``name:index``."""
        return torch.device(self.name, self.index() if index is None else index)

    def index(self) -> int:
        """The current device."""
        return self.module.current_device()

    def set_index(self, index: int) -> None:
        """Make ``index`` current."""
        self.module.set_device(index)

    def count(self) -> int:
        """Visible devices."""
        return self.module.device_count()

    def stream(self, priority: int = 0) -> Any:
        return self.module.Stream(priority=priority)

    def current_stream(self) -> Any:
        return self.module.current_stream()

    def use_stream(self, stream: Any) -> Any:
        """``with device.use_stream(s)``."""
        return self.module.stream(stream)

    def event(self, timing: bool = False) -> Any:
        return self.module.Event(enable_timing=timing)

    def generator(self, index: int | None = None) -> torch.Generator:
        """The default generator of a device."""
        self.module.init()
        return self.module.default_generators[self.index() if index is None else index]

    def synchronize(self) -> None:
        """Wait for the device."""
        self.module.synchronize()

    def memory_stats(self) -> MemoryStats:
        """The caching allocator's statistics, and the driver's free and total bytes."""
        available, total = self.module.mem_get_info()
        return MemoryStats(
            allocated=self.module.memory_allocated(),
            peak=self.module.max_memory_allocated(),
            reserved=self.module.memory_reserved(),
            available=available,
            total=total,
        )

    def reset_peak_memory(self) -> None:
        """Start a new peak."""
        self.module.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        """Return cached blocks to the driver."""
        self.module.empty_cache()

    def properties(self) -> Properties:
        """Name, memory and cores; drivers do not report the peak rate."""
        known = self.module.get_device_properties(self.index())
        cores = next(filter(None, (getattr(known, n, 0) for n in self._core_counts)), 0)
        return Properties(known.name, known.total_memory, int(cores))

    _core_counts: tuple[str, ...] = ("multi_processor_count",)
    """Properties with the number of cores; the first non-zero one is used."""

    excluded_by_expandable_segments: tuple[str, ...] = ()
    """Options of the allocator that cannot be combined with expandable segments."""

    def allocator_setter(self) -> Callable[[str], None] | None:
        """Changes options (``name:value,...``) of an allocator in use; None: impossible."""
        return getattr(self.module.memory, "_set_allocator_settings", None)

    def memory_pool(self) -> Callable[[], AbstractContextManager[None]]:
        """A new pool: allocations of this thread inside ``with pool():`` have their own segments.

        Its memory goes back to the driver when the returned function is deleted and the tensors
        are freed.
        """
        return functools.partial(self.module.use_mem_pool, self.module.MemPool())


class CudaDevice(Accelerator):
    """The current CUDA device of this process."""

    name = "cuda"
    backend = "nccl"
    _capabilities = frozenset(
        {
            "streams",
            "pinned_memory",
            "host_mapped_memory",
            "graphs",
            "triton",
            "fp64_collectives",
            "compile",
        }
    )

    def __init__(self) -> None:
        if not getattr(torch._C, "_cuda_getDeviceCount", int)():
            raise ConfigError(
                "MINDSPEED_DEVICE=cuda, but torch finds no CUDA device; "
                "install a CUDA build of torch and check nvidia-smi, or set MINDSPEED_DEVICE=cpu"
            )
        super().__init__(torch.cuda)

    def has(self, capability: str) -> bool:
        """See the base class; fp8 needs compute capability 8.9."""
        if capability == "fp8":
            return torch.cuda.get_device_capability() >= (8, 9)
        return super().has(capability)

    def allocator_setter(self) -> Callable[[str], None] | None:
        """See the base class; newer torch has one function for all devices."""
        setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        return setter or super().allocator_setter()

    def empty_host_mapped(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Pinned host memory as a tensor ``[*shape]`` on the device.

        Pinned memory has the same address on host and device (unified virtual addressing).
        """
        size = math.prod(shape) * dtype.itemsize
        memory = _PinnedMemory(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        return torch.as_tensor(memory, device=self.torch_device()).view(dtype).view(*shape)


class _PinnedMemory:
    """Bytes of host memory, uint8 ``[n]``, described as memory of the device."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 2,
        }


class NpuDevice(Accelerator):
    """The current NPU of this process."""

    name = "npu"
    backend = "hccl"
    _capabilities = frozenset({"streams", "pinned_memory", "host_mapped_memory"})
    _core_counts = ("cube_core_num", "multi_processor_count")

    def __init__(self, torch_npu: ModuleType) -> None:
        super().__init__(torch_npu.npu)
        self.torch_npu = torch_npu

    def empty_host_mapped(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Swapped memory: kernels may use it, copies may not."""
        empty = torch.ops.npu.empty_with_swapped_memory
        return empty(list(shape), dtype=dtype, device=self.torch_device())

    def install(self, journal: Journal) -> None:
        """Install torch_npu's transfer layer and :mod:`mindspeed.device.npu_shim`."""
        from mindspeed.device import npu_shim

        npu_shim.install(journal, self.torch_npu)

    excluded_by_expandable_segments = ("max_split_size_mb", "garbage_collection_threshold")

    def allocator_setter(self) -> Callable[[str], None]:
        """See the base class; torch_npu takes ``expandable_segments`` alone."""

        def set_option(text: str) -> None:
            options = dict(part.split(":", 1) for part in text.split(","))
            value = options["expandable_segments"]
            self.module.memory._set_allocator_settings(f"expandable_segments:{value}")

        return set_option
