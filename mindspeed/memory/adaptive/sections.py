"""Peaks of a step: the memory of its sections, measured while it runs.

    forward | head | backward of layer n | ... | backward of layer 1 | front | forward | ...

A layer's section begins when the gradient of its output is there and ends where that of the layer
before begins; what its backward needs is the peak of the section less what was allocated when it
began. ``head`` is everything from the end of the last layer's forward to its backward, ``front``
everything after the first layer's backward: the gradient of the embedding, the next embedding.
A step that is measured can be repeated: :class:`Replay` has its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.device import Device

FORWARD, HEAD, FRONT = "forward", "head", "front"


@dataclass
class SectionPeaks:
    """Bytes of the device: the most in each kind of section, over a step.

    Attributes:
        begins: allocated when a chunk's first layer begins its backward, the last of the chunk.
        head: peak of the heads.
        front: peak of the fronts.
    """

    begins: int = 0
    head: int = 0
    front: int = 0


class Sections:
    """Divides steps of one rank into sections.

    Attributes:
        peaks: of the step.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._most, self._allocated = 0, 0
        self._section: Any = FORWARD
        self._ended: Callable[[int], None] | None = None
        self.peaks = SectionPeaks()

    def begin_step(self) -> None:
        """Reset all measurements."""
        self._device.reset_peak_memory()
        self._most, self._section, self._ended = 0, FORWARD, None
        self.peaks = SectionPeaks()

    def peak(self) -> int:
        """The most bytes since the step began."""
        return max(self._most, self._device.memory_stats().peak)

    def enter(
        self, section: str, ended: Callable[[int], None] | None = None, first: bool = False
    ) -> None:
        """Begin a section; ``ended`` gets the bytes that it needed beyond those at its begin."""
        stats = self._device.memory_stats()
        self._most = max(self._most, stats.peak)
        if self._section == HEAD:
            self.peaks.head = max(self.peaks.head, stats.peak)
        elif self._section == FRONT:
            self.peaks.front = max(self.peaks.front, stats.peak)
        if self._ended is not None:
            self._ended(stats.peak - self._allocated)
        if first:
            self.peaks.begins = max(self.peaks.begins, stats.allocated)
        self._section, self._ended, self._allocated = section, ended, stats.allocated
        self._device.reset_peak_memory()


def on_gradient(tensors: Any, call: Callable[[], None]) -> bool:
    """Call once the gradient of the (first) tensor is there; False if it gets none."""
    tensor = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
    if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
        return False

    def hook(_: torch.Tensor) -> None:
        call()

    tensor.register_hook(hook)
    return True


class Replay:
    """Remembers the micro-batches of one step.

    Args:
        source: the data iterator, whose attributes it has; None on stages that read nothing.
    """

    def __init__(self, source: Any) -> None:
        self._source, self._next = source, 0
        self._read: list[Any] = []

    def from_the_start(self) -> Replay | None:
        """The iterator at the first micro-batch; None if there is no source."""
        self._next = 0
        return None if self._source is None else self

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._read):
            self._read.append(next(self._source))
        self._next += 1
        return self._read[self._next - 1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
