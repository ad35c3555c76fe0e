"""Streams, events and graphs of a device that runs everything in program order.

On the CPU an operation has finished when its call returns, so a stream is only a name and waiting
is a no-op. Callers still observe the usual behaviour: ``current_stream()`` is the stream
of the innermost ``with stream(s)``, per thread; events measure time; capturing a graph fails with
a message that names the option to disable.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import torch

_handles = itertools.count(1)


class Event:
    """A point in time; ``elapsed_time`` needs ``enable_timing=True`` as on a GPU."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self.enable_timing = enable_timing
        self._time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Remember the present time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``."""
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("both events must be created with enable_timing=True")
        if self._time is None or end_event._time is None:
            raise RuntimeError("both events must be recorded before elapsed_time is computed")
        return (end_event._time - self._time) * 1e3

    def wait(self, stream: Stream | None = None) -> None:
        """No-op: there is nothing to wait for."""

    def synchronize(self) -> None:
        """No-op: there is nothing to wait for."""

    def query(self) -> bool:
        """All recorded work is complete."""
        return True

    def ipc_handle(self) -> bytes:
        """Refused: there is no inter-process event on the CPU."""
        raise RuntimeError("events cannot be shared between processes on the CPU device")


class Stream:
    """A named queue whose work is always complete."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        self.device = torch.device("cpu")
        self.stream_id = self.cuda_stream = next(_handles)

    def wait_stream(self, stream: Stream) -> None:
        """No-op: there is nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """No-op: there is nothing to wait for."""

    def synchronize(self) -> None:
        """No-op: there is nothing to wait for."""

    def query(self) -> bool:
        """All work is complete."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event`` (or a new one) now."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        _current.stack.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _current.stack.pop()


class ExternalStream(Stream):
    """A stream that was made elsewhere, known by its handle."""

    def __init__(self, stream_ptr: int, device: Any = None, **_: Any) -> None:
        super().__init__(device)
        self.stream_id = self.cuda_stream = stream_ptr


DEFAULT_STREAM = Stream()
DEFAULT_STREAM.stream_id = DEFAULT_STREAM.cuda_stream = 0


class _Current(threading.local):
    def __init__(self) -> None:
        self.stack: list[Stream] = [DEFAULT_STREAM]


_current = _Current()


def current_stream(device: Any = None) -> Stream:
    """The stream of the innermost ``with stream(s)`` of this thread."""
    return _current.stack[-1]


def default_stream(device: Any = None) -> Stream:
    """The stream that is current when none was chosen."""
    return DEFAULT_STREAM


def set_stream(stream: Stream | None) -> None:
    """Make ``stream`` current without a context; ``None`` changes nothing."""
    if stream is not None:
        _current.stack[-1] = stream


class StreamContext:
    """``with stream(s)``: ``s`` is current inside; ``None`` changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            _current.stack.append(self.stream)

    def __exit__(self, *_: Any) -> None:
        if self.stream is not None:
            _current.stack.pop()


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


def _no_graphs(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} needs an NVIDIA GPU: this process computes on the CPU. "
        "Remove --cuda-graph-impl, --enable-cuda-graph and --external-cuda-graph."
    )


class CUDAGraph:
    """Can be named and created, so that callers can look at its methods; cannot capture."""

    def __new__(cls, keep_graph: bool = False) -> CUDAGraph:
        return super().__new__(cls)

    def register_generator_state(self, generator: Any) -> None:
        """No-op: no kernel is ever replayed."""

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Refused."""
        raise _no_graphs("capturing a CUDA graph")

    capture_end = instantiate = replay = reset = pool = capture_begin


class graph:
    """``with torch.cuda.graph(...)``: refused."""

    default_capture_stream = None

    def __init__(self, *_: Any, **__: Any) -> None:
        raise _no_graphs("capturing a CUDA graph")


def make_graphed_callables(*_: Any, **__: Any) -> Any:
    """Refused."""
    raise _no_graphs("torch.cuda.make_graphed_callables")


def graph_pool_handle() -> Any:
    """Refused."""
    raise _no_graphs("torch.cuda.graph_pool_handle")
