"""Place of an optimizer state: host memory instead of next to its parameter.

``HostSwap``    in (pinned) host memory; a step streams it through two buffers on the device:

                copies in    window 0 | window 1 | window 2 | ...
                update                | window 0 | window 1 | ...
                copies out                       | window 0 | ...

``HostMapped``  in host memory that kernels of the device read and write directly.

Both hold whole fp32 states, which checkpoints read from there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed import device

ALIGNMENT = 64
"""Windows are cut between groups of this many elements of a parameter. The CPU's kernels compute
such groups with vector instructions and the rest with scalar ones, which round differently."""


ALL, GIB = "all", 2**30


class StatePlacement(ABC):
    """Placement of one state of every parameter."""

    @abstractmethod
    def allocate(self, shape: Sequence[int], dtype: torch.dtype, place: torch.device) -> Tensor:
        """Uninitialised storage for a parameter on ``place``."""

    @abstractmethod
    def read(self, stored: Tensor) -> Tensor:
        """The state as an ordinary tensor in the dtype of ``stored``."""

    @abstractmethod
    def write(self, stored: Tensor, value: Tensor) -> None:
        """Overwrite ``stored`` with ``value``, of the same shape, in its own dtype."""


@dataclass(frozen=True)
class Span:
    """Elements ``start`` to ``stop`` of the flattened parameter with this ``index`` in a list."""

    index: int
    start: int
    stop: int


def windows(sizes: Sequence[int], limit: int) -> Iterator[list[Span]]:
    """Cut parameters into windows of at most ``limit`` elements.

    Args:
        sizes: elements of each parameter.
        limit: at least :data:`ALIGNMENT`.
    """
    window: list[Span] = []
    room = limit
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            take = min(size - start, room)
            if start + take < size:
                take -= take % ALIGNMENT
            if take:
                window.append(Span(index, start, start + take))
                start, room = start + take, room - take
            if start < size:
                yield window
                window, room = [], limit
    if window:
        yield window


@dataclass
class CopiedBytes:
    """Bytes so far: copied to the device, copied back, and most in buffers at one time."""

    to_device: int = 0
    to_host: int = 0
    peak: int = 0


Update = Callable[[Sequence[Span], Mapping[str, list[Tensor]]], None]


class HostSwap(StatePlacement):
    """The state is in host memory and on the device only while it is updated.

    Args:
        times: windows of a step. Two are on the device, one ``times``-th of the states each.
    """

    def __init__(self, times: int) -> None:
        self.times, self.figures = times, CopiedBytes()
        self._copies: tuple[Any, Any] | None = None
        self._complete: Any = None

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, place: torch.device) -> Tensor:
        """Uninitialised host memory, pinned where the device uses that."""
        return device.host_tensor(shape, dtype)

    def read(self, stored: Tensor) -> Tensor:
        """The host tensor itself, once the last step has written it."""
        if self._complete is not None:
            self._complete.synchronize()
        return stored

    def write(self, stored: Tensor, value: Tensor) -> None:
        """Overwrite the host tensor with ``value``, of the same shape, in its own dtype."""
        self.read(stored).copy_(value)

    def stream(
        self,
        states: Sequence[Mapping[str, Tensor]],
        place: torch.device,
        total: int,
        update: Update,
    ) -> None:
        """Bring the states to the device window by window, update them and bring them back.

        Args:
            states: of each parameter, name -> contiguous host tensor; equal names.
            total: elements of all parameters of the optimizer, of which these may be a part.
            update: changes the states of a window in place: name -> one flat device tensor for
                each span.
        """
        here = device.current()
        if self._copies is None:
            self._copies = here.stream(), here.stream()
        incoming, outgoing = self._copies
        compute = here.current_stream()
        incoming.wait_stream(compute)
        sizes = [next(iter(named.values())).numel() for named in states]
        limit = max(ALIGNMENT, total // self.times)
        buffers = [_Buffer(states, min(limit, sum(sizes)), place) for _ in range(2)]
        self.figures.peak = max(self.figures.peak, sum(buffer.nbytes for buffer in buffers))
        for number, window in enumerate(windows(sizes, limit)):
            buffer = buffers[number % 2]
            with here.use_stream(incoming):
                if number > 1:
                    incoming.wait_event(buffer.emptied)
                parts, size = buffer.load(states, window)
            compute.wait_stream(incoming)
            update(window, parts)
            outgoing.wait_stream(compute)
            with here.use_stream(outgoing):
                _store(states, window, parts)
                buffer.emptied.record(outgoing)
            self.figures.to_device += size
            self.figures.to_host += size
        compute.wait_stream(outgoing)  # the buffers' memory is free for later kernels
        self._complete = here.event()
        self._complete.record(compute)


class _Buffer:
    """Device memory for one window: ``limit`` elements of each state, on ``place``."""

    def __init__(
        self, states: Sequence[Mapping[str, Tensor]], limit: int, place: torch.device
    ) -> None:
        self.flat = {
            name: torch.empty(limit, dtype=state.dtype, device=place)
            for name, state in states[0].items()
        }
        self.emptied = device.current().event()

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self.flat.values())

    def load(
        self, states: Sequence[Mapping[str, Tensor]], window: Sequence[Span]
    ) -> tuple[dict[str, list[Tensor]], int]:
        """Copy a window in; returns its parts, name -> one flat tensor per span, and its bytes."""
        sizes = [span.stop - span.start for span in window]
        parts = {name: list(flat[: sum(sizes)].split(sizes)) for name, flat in self.flat.items()}
        for name, pieces in parts.items():
            for span, piece in zip(window, pieces, strict=True):
                piece.copy_(_elements(states[span.index][name], span), non_blocking=True)
        return parts, sum(piece.nbytes for pieces in parts.values() for piece in pieces)


def _store(
    states: Sequence[Mapping[str, Tensor]],
    window: Sequence[Span],
    parts: Mapping[str, list[Tensor]],
) -> None:
    for name, pieces in parts.items():
        for span, piece in zip(window, pieces, strict=True):
            _elements(states[span.index][name], span).copy_(piece, non_blocking=True)


def _elements(tensor: Tensor, span: Span) -> Tensor:
    return tensor.view(-1)[span.start : span.stop]


class HostMapped(StatePlacement):
    """The state is in host memory with an address on the device: kernels use it in place.

    Ordinary kernels alone may touch such memory on an NPU, and no copies, so it is read and written
    by multiplication with one.

    Args:
        limit: bytes in host memory; states after that stay on the device. None: no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.mapped = limit, 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, place: torch.device) -> Tensor:
        """Uninitialised memory: mapped, or on ``place`` past the limit."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes or (self.limit is not None and self.mapped + nbytes > self.limit):
            return torch.empty(shape, dtype=dtype, device=place)
        self.mapped += nbytes
        return device.host_mapped_tensor(shape, dtype)

    def read(self, stored: Tensor) -> Tensor:
        """A copy in device memory, of the same shape and dtype."""
        return torch.ones_like(stored).mul_(stored)

    def write(self, stored: Tensor, value: Tensor) -> None:
        """Overwrite ``stored``; ``value`` has it, too, any floating dtype and device."""
        stored.fill_(1).mul_(value.to(stored.device, stored.dtype))


def limits(values: tuple[str, ...]) -> list[float]:
    """Values of ``--virtual-optimizer`` in GiB; ``all`` is infinity.

    Raises:
        ValueError: one is neither a positive number nor ``all``, or ``all`` is not alone.
    """
    if values == (ALL,):
        return [math.inf]
    numbers = [float(value) for value in values]
    if not all(number > 0 and math.isfinite(number) for number in numbers):
        raise ValueError("not positive")
    return numbers
