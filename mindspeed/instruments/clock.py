"""Virtual clock: how much communication a schedule hides, by a model of time.

    with VirtualClock(flops_per_second=300e12, link=Link(200e9, latency=10e-6)) as clock:
        work = dist.all_reduce(x, async_op=True)
        y = a @ b
        work.wait()
    clock.exposed        # max(0, time of the all-reduce - time of the product)

The code runs normally with correct results, while a clock advances by a model, so the figures are
equal on every machine and in every run:

* An operator with a FLOP formula (:mod:`mindspeed.instruments.flops`) takes
  ``flops / flops_per_second``; all others take no time, or with ``memory_bytes_per_second``
  that of reading their arguments and writing their results.
* A communication takes ``latency + bytes on the wire / bytes_per_second`` (the bytes of
  :mod:`mindspeed.instruments.ledger`). It starts when it is called, or when the previous one on the
  same process group has ended: each group has its own link.
* ``Work.wait()``, and ``wait_tensor`` of functional collectives, move the clock to the end of
  that communication. The time skipped is exposed. A call without a handle is waited for at once.

A receive is timed like a send, as if its sender called at the same moment; waiting for a slower
rank is not modelled. Calls from other Python threads are not seen.

``VirtualClock.of(rates)`` takes another model of time: :class:`Rates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch._C._distributed_c10d import Work
from torch.utils._pytree import tree_leaves

from mindspeed.device.wrapped_tensors import any_wraps
from mindspeed.instruments.instrument import Instrument, PhaseTracker
from mindspeed.instruments.ledger import DEVICE, NAMESPACES, Communication, CommunicationMode
from mindspeed.instruments.live_memory import kinds_of
from mindspeed.instruments.timeline import Interval
from mindspeed.journal import Journal

__all__ = ["Call", "Link", "Rates", "TimedCall", "VirtualClock"]


@dataclass(frozen=True)
class TimedCall(Interval):
    """A computation, communication or wait, in seconds from the start of the clock.

    Attributes:
        communication: that runs, or is waited for.
        flops: by the operator's formula.
        scope: of the clock when it started.
        memory_bytes: read and written, where there are no FLOPs.
    """

    communication: Communication | None = None
    flops: int = 0
    scope: Any = None
    memory_bytes: int = 0


class VirtualClock(Instrument):
    """Context manager; its figures may be read inside and after the block.

    Args:
        link: of all process groups, or a function that returns the link of a communication.
        memory_bytes_per_second: for operators without a FLOP formula; None: they take no time.

    Attributes:
        now: seconds from the start of the clock.
        intervals: what happened so far, in the order of its start on this rank.
        scope: set by the caller, for example to the layer that runs; intervals carry it.
    """

    def __init__(
        self,
        flops_per_second: float,
        link: Link | Callable[[Communication], Link],
        memory_bytes_per_second: float | None = None,
    ) -> None:
        self.now = 0.0
        self.scope: Any = None
        self.intervals: list[TimedCall] = []
        link_of = link if callable(link) else lambda communication: link
        self._rates: Rates = SimpleRates(flops_per_second, link_of, memory_bytes_per_second)
        self._counts_bytes = memory_bytes_per_second is not None
        self._free_at: dict[str, float] = {}  # stream -> end of its last communication
        self._pending: dict[int, tuple[Any, TimedCall]] = {}  # by id; holds the object alive
        super().__init__()
        self.mode = _Mode(self, self.phase)

    @classmethod
    def of(cls, rates: Rates) -> VirtualClock:
        """A clock with another model of time."""
        clock = cls(1.0, Link(1.0))
        clock._rates, clock._counts_bytes = rates, True
        return clock

    def enter_contexts(self, stack: ExitStack) -> None:
        """Watch ``wait`` of all kinds of handles too."""
        journal = Journal()
        stack.callback(self._pending.clear)
        stack.callback(journal.undo)
        for kind in kinds_of(Work):
            journal.set(kind, "wait", self._observed(kind.wait), owner="clock")
        super().enter_contexts(stack)

    def _observed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def observed(work: Any, *args: Any, **kwargs: Any) -> Any:
            self._wait_for(id(work))
            return wait(work, *args, **kwargs)

        return observed

    @property
    def exposed(self) -> float:
        """Seconds in which this rank waited for communication."""
        return sum(interval.seconds for interval in self.select("wait"))

    @property
    def routed(self) -> float:
        """Seconds of operators that grow with the tokens that are routed to this rank."""
        return self._rates.routed

    @property
    def computing(self) -> float:
        """Seconds of operators that take time."""
        return sum(interval.seconds for interval in self.select("compute"))

    def select(
        self, kind: str, *, op: str | None = None, phase: str | None = None
    ) -> Iterator[TimedCall]:
        """Yields the intervals of one kind; of one communication ("all_gather") and phase."""
        for interval in self.intervals:
            found = interval.communication
            if interval.kind != kind or phase not in (None, interval.phase):
                continue
            if op is None or (found is not None and found.op == op):
                yield interval

    def _compute(self, func: Any, args: Any, kwargs: Any, result: Any, formula: Any) -> None:
        flops = formula(*args, **kwargs, out_val=result) if formula is not None else 0
        wanted = self._counts_bytes and func.namespace not in NAMESPACES
        nbytes = moved_bytes(func, (args, kwargs), result) if wanted else 0
        if not flops and not nbytes:
            return
        start = self.now
        self.now = self._end(self._rates.operator(Call(func, args, kwargs, result, flops, nbytes)))
        if self.now > start:
            moved = 0 if flops else nbytes
            self._note(
                "compute", func._schema.name, start, self.now, flops=flops, memory_bytes=moved
            )

    def _end(self, seconds: float) -> float:
        """End of a computation that starts now; it is slower while communication runs."""
        slowdown = self._rates.slowdown
        if slowdown == 1.0:
            return self.now + seconds
        busy = max(0.0, max(self._free_at.values(), default=0.0) - self.now)
        return self.now + min(seconds * slowdown, seconds + busy * (1 - 1 / slowdown))

    def _communicate(self, name: str, communication: Communication) -> TimedCall:
        stream = self._rates.stream(communication)
        start = max(self.now, self._free_at.get(stream, 0.0))
        end = start + self._rates.communication(communication)
        self._free_at[stream] = end
        return self._note("communication", name, start, end, communication)

    def _expect(self, waitable: Any, interval: TimedCall) -> None:
        self._pending[id(waitable)] = (waitable, interval)

    def _wait_for(self, key: int) -> None:
        if (found := self._pending.pop(key, None)) is not None:
            self._wait(found[1])

    def _wait(self, interval: TimedCall) -> None:
        if interval.end > self.now:
            self._note("wait", interval.name, self.now, interval.end, interval.communication)
            self.now = interval.end

    def _note(
        self,
        kind: Literal["compute", "communication", "wait"],
        name: str,
        start: float,
        end: float,
        communication: Communication | None = None,
        flops: int = 0,
        memory_bytes: int = 0,
    ) -> TimedCall:
        phase = self.phase.current()
        interval = TimedCall(
            _lane(kind, communication),
            kind,
            name,
            start,
            end,
            phase,
            (),
            communication,
            flops,
            self.scope,
            memory_bytes,
        )
        self.intervals.append(interval)
        return interval


class _Mode(CommunicationMode):
    """Times operators and records the handles of communications."""

    def __init__(self, clock: VirtualClock, phase: PhaseTracker) -> None:
        super().__init__(phase, lambda event: None)
        self._clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device
        if any_wraps(types):  # of AsyncCollectiveTensor, wait_tensor and func come again
            return NotImplemented
        kwargs, traits = kwargs or {}, self.traits_of(func)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if traits.name == "_c10d_functional::wait_tensor":
            self._clock._wait_for(storage_of(args[0]))
            return func(*args, **kwargs)
        kernel = traits.operator
        result = func(*args, **kwargs) if kernel is None else self._inside(kernel, args)
        if traits.formula is None or kernel is None:  # the products of a kernel are timed inside
            self._clock._compute(func, args, kwargs, result, traits.formula)
        if traits.collective:
            self._started(traits.name, self.communications(func, args, kwargs), result)
        return result

    def _started(self, name: str, communications: list[Communication], result: Any) -> None:
        for communication in communications:
            interval = self._clock._communicate(name, communication)
            leaves = tree_leaves(result)
            if leaves and isinstance(leaves[-1], torch.ScriptObject):
                self._clock._expect(Work.unbox(leaves[-1]), interval)
            elif name.startswith("_c10d_functional"):
                for tensor in leaves:
                    self._clock._pending[storage_of(tensor)] = (tensor, interval)
            else:
                self._clock._wait(interval)


def _lane(kind: str, communication: Communication | None) -> str:
    """``TENSOR_MODEL_PARALLEL_GROUP`` -> ``tensor model parallel``."""
    if communication is None:
        return "operators"
    if kind == "wait":
        return "waiting"
    group = communication.description.removesuffix("_GROUP").replace("_", " ").lower()
    return group or "default group"


_LIFTED = torch.ops.aten.lift_fresh.default
"""Its result is another tensor where a constant becomes a FakeTensor."""


def moved_bytes(func: Any, inputs: Any, result: Any) -> int:
    """Bytes that an operator reads and writes; views and allocations move none."""
    if func.is_view and func is not _LIFTED:
        return 0
    given, made = tensors_in(inputs), tensors_in(result)
    known = set(map(storage_of, given))
    if func._schema.is_mutable:
        return sum(map(extent, given)) + sum(extent(x) for x in made if storage_of(x) in known)
    name = func._schema.name.split("::")[1]
    if not made or any(storage_of(x) in known for x in made) or "empty" in name:
        return 0
    if name.startswith("new_") or name.endswith("_like"):
        given = []  # it gives shape and dtype only
    return sum(map(extent, [*given, *made]))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors in sequences and dictionaries, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for one in value for tensor in tensors_in(one)]


def extent(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; ``[n, 1]`` expanded to ``[n, m]`` counts n elements."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride) * tensor.element_size()


def storage_of(tensor: torch.Tensor) -> int:
    """Key of the storage of a tensor, as long as that lives."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Link:
    """Link model of a process group.

    Attributes:
        bytes_per_second: that one rank sends.
        latency: seconds added to every call.
    """

    bytes_per_second: float
    latency: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Time of one communication that puts ``nbytes`` on the wire."""
        return self.latency + nbytes / self.bytes_per_second


class Call(NamedTuple):
    """A call of an operator that has run.

    Attributes:
        flops: by its formula; 0 without one.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    flops: int
    nbytes: int


class Rates(Protocol):
    """A model of time."""

    @property
    def slowdown(self) -> float:
        """How many times as long computation takes while communication runs."""

    @property
    def routed(self) -> float:
        """Seconds of operators so far that grow with the tokens that are routed to a rank."""

    def operator(self, call: Call) -> float:
        """Seconds of an operator, which may be 0; not of communications."""

    def communication(self, communication: Communication) -> float:
        """Seconds of a communication once it has started."""

    def stream(self, communication: Communication) -> str:
        """Communications with the same answer run one after the other."""


@dataclass(frozen=True)
class SimpleRates:
    """FLOPs and, where ``memory`` is given, bytes of operators; one link per process group."""

    flops_per_second: float
    link_of: Callable[[Communication], Link]
    memory: float | None
    slowdown: float = 1.0
    routed: float = 0.0

    def operator(self, call: Call) -> float:
        """Computation, else bytes."""
        if call.flops:
            return call.flops / self.flops_per_second
        return call.nbytes / self.memory if self.memory is not None else 0.0

    def communication(self, communication: Communication) -> float:
        """Latency and bytes on the wire."""
        return self.link_of(communication).seconds(communication.wire)

    def stream(self, communication: Communication) -> str:
        """The process group."""
        return communication.group
