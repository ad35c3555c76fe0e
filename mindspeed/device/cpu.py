"""The CPU as a device: gloo, one stream, memory of the process."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import torch

from mindspeed.device import host_memory, torch_cuda_shim, tracker
from mindspeed.device.base import Device, MemoryStats, Properties
from mindspeed.device.torch_cuda_shim import namespace, streams
from mindspeed.journal import Journal


class CpuDevice(Device):
    """The CPU of this host; every local process counts as one device."""

    name = "cpu"
    backend = "gloo"
    on_host = True
    _capabilities = frozenset({"fp64_collectives", "host_mapped_memory"})

    def install(self, journal: Journal) -> None:
        """Map the names of torch.cuda that Megatron uses to the CPU."""
        torch_cuda_shim.install(journal)

    def torch_device(self, index: int | None = None) -> torch.device:
        """Always ``cpu``, without an index."""
        return torch.device("cpu")

    def index(self) -> int:
        """The local index this process was given."""
        return namespace.current_device()

    def set_index(self, index: int) -> None:
        """Remember the local index."""
        namespace.set_device(index)

    def count(self) -> int:
        """Processes of this job on this host."""
        return namespace.local_devices()

    def stream(self, priority: int = 0) -> streams.Stream:
        """A new stream object; all share one queue."""
        return streams.Stream(priority=priority)

    def current_stream(self) -> streams.Stream:
        """The innermost stream in use."""
        return streams.current_stream()

    def use_stream(self, stream: streams.Stream | None) -> streams.StreamContext:
        """``with device.use_stream(s)``."""
        return streams.StreamContext(stream)

    def event(self, timing: bool = False) -> streams.Event:
        return streams.Event(enable_timing=timing)

    def generator(self, index: int | None = None) -> torch.Generator:
        """torch's default generator: CPU operators draw from it."""
        return torch.default_generator

    def synchronize(self) -> None:
        """No-op: operators are synchronous."""

    def empty_host_mapped(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory: all memory of the CPU is host memory."""
        return torch.empty(shape, dtype=dtype)

    def memory_stats(self) -> MemoryStats:
        """Live tensors inside ``track_memory()``, else the resident set of the process."""
        active, resident = tracker.active(), host_memory.resident()
        return MemoryStats(
            allocated=active.current if active else resident,
            peak=active.peak if active else host_memory.peak_resident(),
            reserved=resident,
            available=host_memory.available(),
            total=host_memory.total(),
        )

    def reset_peak_memory(self) -> None:
        """Start a new peak of the process and of the tracker."""
        active = tracker.active()
        if active:
            active.reset_peak()
        host_memory.reset_peak()

    def empty_cache(self) -> None:
        """No-op: there is no cache."""

    def properties(self) -> Properties:
        """The host's processor; its peak rate is unknown."""
        return Properties(
            name=_processor() or platform.machine() or "cpu",
            total_memory=host_memory.total(),
            cores=os.cpu_count() or 1,
        )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
