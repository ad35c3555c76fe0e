"""The accelerator API that library code uses on every device.

``mindspeed.device.current()`` returns the one :class:`Device` of this process. Algorithms use it
instead of ``torch.cuda`` or ``torch.npu``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.journal import Journal

CAPABILITIES = frozenset(
    {
        "streams",  # work of two streams can run at the same time
        "pinned_memory",  # host memory can be locked for asynchronous copies
        "host_mapped_memory",  # kernels can read and write host memory at an address of the device
        "graphs",  # a stream of kernels can be captured and replayed
        "triton",  # Triton kernels run here
        "fp64_collectives",  # all_reduce of float64
        "fp8",  # float8 matrix multiplication
        "compile",  # torch.compile pays off
    }
)


@dataclass(frozen=True)
class MemoryStats:
    """Memory in bytes; on the CPU of the process, or of live tensors while they are tracked."""

    allocated: int
    peak: int
    reserved: int
    available: int
    total: int


@dataclass(frozen=True)
class Properties:
    """Properties of a device; ``peak_flops`` is None where it is unknown."""

    name: str
    total_memory: int
    cores: int
    peak_flops: float | None = None


class Device(ABC):
    """One kind of device, as used by this process."""

    name: str
    """The type of its ``torch.device``: ``"cpu"``, ``"cuda"``, ``"npu"`` or a plug-in's."""
    backend: str
    """The torch.distributed backend of this device."""
    on_host: bool = False
    """Operators run on the host: its memory holds the tensors, torch's default generator draws the
    random numbers, and its cores are shared with data workers and writers of checkpoints."""
    _capabilities: frozenset[str] = frozenset()

    def has(self, capability: str) -> bool:
        """Whether the device can do one of :data:`CAPABILITIES`."""
        if capability not in CAPABILITIES:
            raise ValueError(
                f"unknown capability {capability!r}; known are {', '.join(sorted(CAPABILITIES))}"
            )
        return capability in self._capabilities

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, {self.count()} on this host, {self.backend}>"

    def install(self, journal: Journal) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Make Megatron's calls of ``torch.cuda`` work on this device.

        Args:
            journal: records every change; ``journal.undo()`` restores the original objects.
        """

    @abstractmethod
    def torch_device(self, index: int | None = None) -> torch.device:
        """The ``torch.device`` of this process, or of ``index``."""

    @abstractmethod
    def index(self) -> int:
        """Index of the device this process uses."""

    @abstractmethod
    def set_index(self, index: int) -> None:
        """Use device ``index`` from now on."""

    @abstractmethod
    def count(self) -> int:
        """Devices of this host."""

    @abstractmethod
    def stream(self, priority: int = 0) -> Any:
        """A new stream."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream in use."""

    @abstractmethod
    def use_stream(self, stream: Any) -> Any:
        """Context manager in which ``stream`` is in use; ``None`` changes nothing."""

    @abstractmethod
    def event(self, timing: bool = False) -> Any:
        """A new event; ``timing`` makes ``elapsed_time`` work."""

    @abstractmethod
    def generator(self, index: int | None = None) -> torch.Generator:
        """The generator that operators on this device draw from by default."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work of this device is complete."""

    def empty_host_mapped(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory that kernels of this device address.

        Raises:
            NotImplementedError: the device has no ``host_mapped_memory``.
        """
        raise NotImplementedError(f"kernels of {self.name} cannot address host memory")

    @abstractmethod
    def memory_stats(self) -> MemoryStats:
        """Memory in use."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new peak."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give cached memory back."""

    @abstractmethod
    def properties(self) -> Properties:
        """Name, memory, cores and peak rate."""
