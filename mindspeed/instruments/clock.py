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

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch._C._distributed_c10d import Work
from torch.utils._pytree import tree_leaves

from mindspeed.device.wrapped_tensors import any_wraps
from mindspeed.instruments.instrument import Instrument, PhaseTracker
from mindspeed.instruments.ledger import (
    DEVICE,
    Communication,
    CommunicationMode,
    OperatorTraits,
)
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
        counts_bytes: whether operators without a FLOP formula take time.
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
        self.counts_bytes = memory_bytes_per_second is not None
        self._free_at: dict[str, float] = {}  # stream -> end of its last communication
        self._busy_until = 0.0
        self._pending: dict[int, tuple[Any, TimedCall]] = {}  # by id; holds the object alive
        super().__init__()
        self.mode = _Mode(self, self.phase)

    @classmethod
    def of(cls, rates: Rates) -> VirtualClock:
        """A clock with another model of time."""
        clock = cls(1.0, Link(1.0))
        clock._rates, clock.counts_bytes = rates, True
        return clock

    def enter_contexts(self, stack: ExitStack) -> None:
        """Watch ``wait`` of all kinds of handles too."""
        stack.enter_context(self._waits())
        super().enter_contexts(stack)

    @contextmanager
    def told(self, phase: PhaseTracker) -> Iterator[None]:
        """Run with what another mode tells by :meth:`before` and :meth:`after` each operator.

        Two modes take twice as long, most of it on the way to them.

        Args:
            phase: of the instrument of that mode.
        """
        own, self.phase = self.phase, phase
        try:
            with self._waits():
                yield
        finally:
            self.phase = own

    @contextmanager
    def _waits(self) -> Iterator[None]:
        journal = Journal()
        for kind in kinds_of(Work):
            journal.set(kind, "wait", self._observed(kind.wait), owner="clock")
        try:
            yield
        finally:
            journal.undo()
            self._pending.clear()

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

    def before(self, traits: OperatorTraits, args: Any) -> None:
        """Tell of an operator that is about to run."""
        if traits.name == "_c10d_functional::wait_tensor":
            self._wait_for(storage_of(args[0]))

    def after(self, traits: OperatorTraits, call: Call, sent: Sequence[Communication]) -> None:
        """Tell of an operator that has run, and of its communications."""
        if call.flops or call.nbytes:
            self._compute(traits.name, call)
        for communication in sent:
            self._started(traits.name, communication, call.result)

    def _compute(self, name: str, call: Call) -> None:
        start = self.now
        self.now = self._end(self._rates.operator(call))
        if self.now > start:
            moved = 0 if call.flops else call.nbytes
            self._note("compute", name, start, self.now, flops=call.flops, memory_bytes=moved)

    def _started(self, name: str, communication: Communication, result: Any) -> None:
        interval = self._communicate(name, communication)
        leaves = tree_leaves(result)
        if leaves and isinstance(leaves[-1], torch.ScriptObject):
            self._expect(Work.unbox(leaves[-1]), interval)
        elif name.startswith("_c10d_functional"):
            for tensor in leaves:
                self._pending[storage_of(tensor)] = (tensor, interval)
        else:
            self._wait(interval)

    def _end(self, seconds: float) -> float:
        """End of a computation that starts now; it is slower while communication runs."""
        slowdown = self._rates.slowdown
        if slowdown == 1.0:
            return self.now + seconds
        busy = max(0.0, self._busy_until - self.now)
        return self.now + min(seconds * slowdown, seconds + busy * (1 - 1 / slowdown))

    def _communicate(self, name: str, communication: Communication) -> TimedCall:
        stream = self._rates.stream(communication)
        start = max(self.now, self._free_at.get(stream, 0.0))
        end = start + self._rates.communication(communication)
        self._free_at[stream] = end
        self._busy_until = max(self._busy_until, end)
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
        self._clock.before(traits, args)
        sent = self.communications(func, args, kwargs) if traits.collective else ()
        kernel = traits.operator
        result = func(*args, **kwargs) if kernel is None else self._inside(kernel, args)
        if kernel is None or traits.formula is None:  # the products of a kernel are timed inside
            call = Call.of(traits, func, args, kwargs, result, self._clock.counts_bytes)
            self._clock.after(traits, call, sent)
        return result


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
    moves = _moves_of(func)
    if moves == "nothing":
        return 0
    given, made = tensors_in(inputs), tensors_in(result)
    known = set(map(storage_of, given))
    if moves == "in place":
        return sum(map(extent, given)) + sum(extent(x) for x in made if storage_of(x) in known)
    if not made or any(storage_of(x) in known for x in made):
        return 0
    return sum(map(extent, made if moves == "result" else [*given, *made]))


@cache
def _moves_of(func: Any) -> str:
    """What an operator moves: nothing, the result, arguments in place, or all."""
    name = func._schema.name.split("::")[1]
    if func.is_view and func is not _LIFTED:
        return "nothing"
    if func._schema.is_mutable:
        return "in place"
    if "empty" in name:
        return "nothing"
    return "result" if name.startswith("new_") or name.endswith("_like") else "all"


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors in sequences and dictionaries, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return found
    for one in value:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple | dict):
            found += tensors_in(one)
    return found


def extent(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; ``[n, 1]`` expanded to ``[n, m]`` counts n elements."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.numel() * tensor.element_size()
    sizes = zip(tensor.shape, strides, strict=True)
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
        nbytes: read and written.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    flops: int
    nbytes: int

    @classmethod
    def of(
        cls,
        traits: OperatorTraits,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        with_bytes: bool = True,
    ) -> Call:
        """Describe a call."""
        formula = traits.formula
        flops = 0 if formula is None else formula(*args, **kwargs, out_val=result)
        moves = with_bytes and (traits.moves or func is _LIFTED)
        nbytes = moved_bytes(func, (args, kwargs), result) if moves else 0
        return cls(func, args, kwargs, result, flops, nbytes)


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
