"""A device with streams on CPU tensors, which finds accesses that no event orders.

Operators run at once, in program order, so results are right whatever the streams do. What would go
wrong on a GPU is found by vector clocks: every operator gets the time of its stream, waiting joins
times, and an event that the host has seen complete orders everything that comes later. Two accesses
of the same bytes on different streams, of which one writes, need an order. Memory that is freed is
given out again at once by malloc, as a caching allocator would.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed.device.cpu import CpuDevice

Clock = Counter[str]


class Stream:
    def __init__(self, name: str) -> None:
        self.name, self.clock = name, Clock()

    def wait_event(self, event: Event) -> None:
        self.clock |= event.clock

    def wait_stream(self, other: Stream) -> None:
        self.clock |= other.clock


class Event:
    def __init__(self, device: FakeDevice) -> None:
        self._device, self.clock = device, Clock()

    def record(self, stream: Stream) -> None:
        self.clock = Clock(stream.clock)

    def query(self) -> bool:
        if self._device.complete:
            self._device.host |= self.clock
        return self._device.complete


class FakeDevice(CpuDevice):
    """Attributes:
    complete: What events answer to the host.
    """

    def __init__(self) -> None:
        self.complete = True
        self.host = Clock()
        self.compute = Stream("compute")
        self._current, self._made = [self.compute], 0

    def stream(self, priority: int = 0) -> Any:
        self._made += 1
        return Stream(["out", "back"][self._made - 1])

    def current_stream(self) -> Any:
        return self._current[-1]

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def event(self, timing: bool = False) -> Any:
        return Event(self)


@dataclass(frozen=True)
class Access:
    stream: str
    time: int
    start: int
    end: int
    writes: bool
    operator: str

    def conflicts(self, other: Access) -> bool:
        overlap = self.start < other.end and other.start < self.end
        return overlap and (self.writes or other.writes) and self.stream != other.stream


class Races(TorchDispatchMode):
    """Finds pairs of accesses without an order, in :attr:`found`."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device
        self._accesses: list[Access] = []
        self.found: list[tuple[Access, Access]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        infos = [a.alias_info for a in func._schema.arguments]
        if any(i and not i.is_write for i in infos) or func._schema.name.startswith("aten::empty"):
            return result  # a view, or memory without values
        stream = self._device.current_stream()
        stream.clock |= self._device.host
        stream.clock[stream.name] += 1
        written = {id(x) for x in tree_leaves(result)} | {
            id(a) for a, info in zip(args, infos, strict=False) if info and info.is_write
        }
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.numel():
                self._note(x, id(x) in written, stream, func._schema.name)
        return result

    def _note(self, x: torch.Tensor, writes: bool, stream: Stream, operator: str) -> None:
        pairs = zip(x.size(), x.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in pairs)
        end = x.data_ptr() + (last + 1) * x.element_size()
        time = stream.clock[stream.name]
        access = Access(stream.name, time, x.data_ptr(), end, writes, operator)
        for before in self._accesses:
            if access.conflicts(before) and stream.clock[before.stream] < before.time:
                self.found.append((before, access))
        self._accesses.append(access)
