"""A device with its own memory and streams, through a module that mirrors ``torch.cuda``.

torch has one such module per kind of device (``torch.cuda``, ``torch.xpu``; torch_npu brings
``torch.npu``), with the same names in each. A device of another kind is a short subclass: its
name, its torch.distributed backend, what it can do, and :meth:`~Device.install`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from mindspeed.device.base import Device, MemoryStats, Properties


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
