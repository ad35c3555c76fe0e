"""An Ascend NPU through torch_npu.

The torch_npu module is handed in, so that everything here is tested with a stand-in object; the
names used are those of ``torch_npu.npu``, which mirror ``torch.cuda``. Importing torch_npu and its
failure without CANN are :mod:`mindspeed.device.detect`'s business.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from mindspeed.device.base import Device, MemoryStats, Properties


class NpuDevice(Device):
    """The current NPU of this process."""

    name = "npu"
    backend = "hccl"
    _capabilities = frozenset({"streams", "pinned_memory"})

    def __init__(self, torch_npu: ModuleType) -> None:
        self.torch_npu = torch_npu
        self.npu = torch_npu.npu

    def torch_device(self, index: int | None = None) -> torch.device:
        """``npu:index``."""
        return torch.device("npu", self.index() if index is None else index)

    def index(self) -> int:
        """The current device."""
        return self.npu.current_device()

    def set_index(self, index: int) -> None:
        """Make ``index`` current."""
        self.npu.set_device(index)

    def count(self) -> int:
        """Visible devices."""
        return self.npu.device_count()

    def stream(self, priority: int = 0) -> Any:
        """A new stream."""
        return self.npu.Stream(priority=priority)

    def current_stream(self) -> Any:
        """The current stream."""
        return self.npu.current_stream()

    def use_stream(self, stream: Any) -> Any:
        """``with device.use_stream(s)``."""
        return self.npu.stream(stream)

    def event(self, timing: bool = False) -> Any:
        """A new event."""
        return self.npu.Event(enable_timing=timing)

    def generator(self, index: int | None = None) -> torch.Generator:
        """The default generator of a device."""
        self.npu.init()
        return self.npu.default_generators[self.index() if index is None else index]

    def synchronize(self) -> None:
        """Wait for the device."""
        self.npu.synchronize()

    def memory_stats(self) -> MemoryStats:
        """The caching allocator's figures."""
        available, total = self.npu.mem_get_info()
        return MemoryStats(
            allocated=self.npu.memory_allocated(),
            peak=self.npu.max_memory_allocated(),
            reserved=self.npu.memory_reserved(),
            available=available,
            total=total,
        )

    def reset_peak_memory(self) -> None:
        """Start a new peak."""
        self.npu.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        """Return cached blocks to the driver."""
        self.npu.empty_cache()

    def properties(self) -> Properties:
        """Name, memory and AI cores; the peak rate is not something the driver tells."""
        known = self.npu.get_device_properties(self.index())
        cores = getattr(known, "cube_core_num", 0) or getattr(known, "multi_processor_count", 0)
        return Properties(known.name, known.total_memory, int(cores))
