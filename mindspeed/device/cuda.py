"""An NVIDIA GPU: torch.cuda as it is. Nothing is ever replaced on this device."""

from __future__ import annotations

import torch

from mindspeed.device.base import Device, MemoryStats, Properties
from mindspeed.errors import ConfigError


class CudaDevice(Device):
    """The current CUDA device of this process."""

    name = "cuda"
    backend = "nccl"
    _capabilities = frozenset(
        {"streams", "pinned_memory", "graphs", "triton", "fp64_collectives", "compile"}
    )

    def __init__(self) -> None:
        if not getattr(torch._C, "_cuda_getDeviceCount", int)():
            raise ConfigError(
                "MINDSPEED_DEVICE=cuda, but torch finds no CUDA device; "
                "install a CUDA build of torch and check nvidia-smi, or set MINDSPEED_DEVICE=cpu"
            )

    def has(self, capability: str) -> bool:
        """As documented in the base class; fp8 needs compute capability 8.9."""
        if capability == "fp8":
            return torch.cuda.get_device_capability() >= (8, 9)
        return super().has(capability)

    def torch_device(self, index: int | None = None) -> torch.device:
        """``cuda:index``."""
        return torch.device("cuda", self.index() if index is None else index)

    def index(self) -> int:
        """The current device."""
        return torch.cuda.current_device()

    def set_index(self, index: int) -> None:
        """Make ``index`` current."""
        torch.cuda.set_device(index)

    def count(self) -> int:
        """Visible devices."""
        return torch.cuda.device_count()

    def stream(self, priority: int = 0) -> torch.cuda.Stream:
        """A new stream."""
        return torch.cuda.Stream(priority=priority)

    def current_stream(self) -> torch.cuda.Stream:
        """The current stream."""
        return torch.cuda.current_stream()

    def use_stream(self, stream: torch.cuda.Stream | None) -> torch.cuda.StreamContext:
        """``with device.use_stream(s)``."""
        return torch.cuda.stream(stream)

    def event(self, timing: bool = False) -> torch.cuda.Event:
        """A new event."""
        return torch.cuda.Event(enable_timing=timing)

    def generator(self, index: int | None = None) -> torch.Generator:
        """The default generator of a device."""
        torch.cuda.init()
        return torch.cuda.default_generators[self.index() if index is None else index]

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def memory_stats(self) -> MemoryStats:
        """The caching allocator's figures."""
        available, total = torch.cuda.mem_get_info()
        return MemoryStats(
            allocated=torch.cuda.memory_allocated(),
            peak=torch.cuda.max_memory_allocated(),
            reserved=torch.cuda.memory_reserved(),
            available=available,
            total=total,
        )

    def reset_peak_memory(self) -> None:
        """Start a new peak."""
        torch.cuda.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        """Return cached blocks to the driver."""
        torch.cuda.empty_cache()

    def properties(self) -> Properties:
        """Name, memory and multiprocessors; the peak rate is not something CUDA tells."""
        known = torch.cuda.get_device_properties(self.index())
        return Properties(known.name, known.total_memory, known.multi_processor_count)
