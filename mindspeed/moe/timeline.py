"""When the steps of a program run, over links and compute rates, without running them.

    line = simulate(program, costs, Rates(flops_per_second=300e12, links=lambda m: link))
    line.total, line.exposed()                   # seconds
    line.log.exposed("backward")                 # communications with no computation beside them

The program is the one that :func:`mindspeed.moe.interpreter.execute` runs; backward is its mirror
image. A computation occupies the compute stream. A communication starts when it is called, or when
the one before it on the same group has ended; finishing it moves the compute stream to its end.
These are the rules of :mod:`mindspeed.instruments.clock`, which watches the real layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, Protocol

from mindspeed.moe.costs import BACKWARD, FORWARD, Costs, StageCosts, Work
from mindspeed.moe.events import EventLog, Kind
from mindspeed.moe.messages import Message
from mindspeed.moe.program import Phase, Program, Step

COMPUTE = "compute"
SIDE = ("shared", "shared_fc1", "shared_fc2", "anchor")  # once for all chunks


class Link(Protocol):
    """How long a communication takes, such as :class:`mindspeed.instruments.clock.Link`."""

    def seconds(self, nbytes: float) -> float:
        """Of one that sends ``nbytes``."""
        ...


@dataclass(frozen=True)
class Rates:
    """How fast one rank is.

    Attributes:
        flops_per_second: of matrix products.
        seconds_of: of a communication.
        bytes_per_second: of memory, for all other operators; None: they take no time.
    """

    flops_per_second: float
    seconds_of: Callable[[Message], float]
    bytes_per_second: float | None = None

    def seconds(self, work: Work) -> float:
        """Of a computation."""
        moving = 0.0 if self.bytes_per_second is None else work.bytes / self.bytes_per_second
        return work.flops / self.flops_per_second + moving


@dataclass(frozen=True)
class Interval:
    """Something that takes time, in seconds from the start of forward.

    Attributes:
        stream: "compute", or the group of a communication.
        kind: a computation, a communication, or the wait for one on the compute stream.
        name: of the stage, or of the message.
        chunk: its index.
        phase: "forward" or "backward".
        start: seconds.
        end: seconds.
    """

    stream: str
    kind: Literal["compute", "communication", "wait"]
    name: str
    chunk: int
    phase: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start


@dataclass
class Timeline:
    """What a simulation found.

    Attributes:
        intervals: in the order in which they begin on the compute stream.
        log: the events that the interpreter would log.
        messages: by phase, in the order of their starts.
        ends: seconds at which the phases end.
    """

    intervals: list[Interval] = field(default_factory=list)
    log: EventLog = field(default_factory=EventLog)
    messages: dict[str, list[Message]] = field(default_factory=lambda: {FORWARD: [], BACKWARD: []})
    ends: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of both passes."""
        return max(self.ends.values())

    def exposed(self, phase: str | None = None) -> float:
        """Seconds of one pass, or of both, in which this rank only waits."""
        return sum(
            one.seconds
            for one in self.intervals
            if one.kind == "wait" and phase in (None, one.phase)
        )

    def wire(self, phase: str | None = None) -> float:
        """Bytes that this rank sends."""
        chosen = self.messages.values() if phase is None else [self.messages[phase]]
        return sum(message.wire for found in chosen for message in found)

    def calls(self, phase: str | None = None) -> int:
        """Communications."""
        chosen = self.messages.values() if phase is None else [self.messages[phase]]
        return sum(map(len, chosen))


@dataclass(frozen=True)
class Inner:
    """A program with chunks of its own that runs inside a stage.

    Attributes:
        program: its order.
        costs: of its stages, for every chunk.
    """

    program: Program
    costs: Sequence[Costs]


@dataclass(frozen=True)
class Action:
    """A step of one chunk.

    Attributes:
        step: of the program, or its mirror image.
        chunk: its index.
        costs: of its stage.
    """

    step: Step
    chunk: int
    costs: StageCosts


def simulate(
    program: Program,
    costs: Costs | Sequence[Costs],
    rates: Rates,
    chunks: int = 1,
    inner: Mapping[str, Inner] | None = None,
    repeat: Callable[[list[Action]], list[Action]] | None = None,
) -> Timeline:
    """Run forward and backward of a program.

    Args:
        program: The order.
        costs: Of every stage, for one chunk, or for each; stages that are missing are left out.
        rates: How fast this rank is.
        chunks: Of the tokens, if their costs are the same.
        inner: Programs that run in the place of a stage.
        repeat: Adds what backward does again to its actions (:mod:`mindspeed.moe.repetition`).
    """
    each = [costs] * chunks if isinstance(costs, Mapping) else costs
    forward = list(_actions(program, each, inner or {}))
    backward = list(mirrored(forward))
    if repeat is not None:
        backward = repeat(backward)
    return play([*product([FORWARD], forward), *product([BACKWARD], backward)], rates)


def play(actions: Iterable[tuple[str, Action]], rates: Rates) -> Timeline:
    """Run actions in their order, each in its pass.

    Args:
        actions: (pass, action), of both passes.
        rates: How fast this rank is.
    """
    run = _Run(rates)
    for phase, action in actions:
        run.take(phase, action)
        run.timeline.ends[phase] = run.now
    return run.timeline


def _actions(
    program: Program, costs: Sequence[Costs], inner: Mapping[str, Inner]
) -> Iterator[Action]:
    for chunk, step in program.for_chunks(len(costs)):
        if (within := inner.get(step.name)) is not None:
            yield from _actions(within.program, within.costs, {})
        if step.name in costs[chunk] and (step.name not in SIDE or chunk == 0):
            yield Action(step, chunk, costs[chunk][step.name])


def mirrored(actions: Sequence[Action]) -> Iterator[Action]:
    """The order in which autograd runs them: what finished in forward starts in backward."""
    turned = {Phase.START: Phase.FINISH, Phase.FINISH: Phase.START, Phase.COMPUTE: Phase.COMPUTE}
    for action in reversed(actions):
        step = Step(action.step.name, turned[action.step.phase])
        yield Action(step, action.chunk, action.costs)


class _Run:
    """The compute stream, the streams of groups, and what is in flight."""

    def __init__(self, rates: Rates) -> None:
        self.now = 0.0
        self.timeline = Timeline()
        self._rates = rates
        self._free_at: dict[str, float] = {}
        self._flying: dict[tuple[str, str, int], list[Interval]] = {}

    def take(self, phase: str, action: Action) -> None:
        """One step in one pass."""
        costs, name = action.costs, action.step.name
        if action.step.phase is Phase.COMPUTE:
            messages = costs.messages if phase == FORWARD else costs.reverses
            for message in messages:  # one that is waited for at once
                self._finish(self._start(phase, message, action.chunk))
            self._compute(phase, action)
        elif action.step.phase is Phase.START:
            messages = costs.messages if phase == FORWARD else costs.reverses
            flying = [self._start(phase, message, action.chunk) for message in messages]
            self._flying[phase, name, action.chunk] = flying
        else:
            for interval in self._flying.pop((phase, name, action.chunk)):
                self._finish(interval)

    def _compute(self, phase: str, action: Action) -> None:
        costs = action.costs
        name = costs.logged or action.step.name
        work = costs.forward if phase == FORWARD else costs.backward
        if phase not in costs.silent:
            self.timeline.log.add(phase, Kind.COMPUTE, name, action.chunk)
        if seconds := self._rates.seconds(work):
            end = self.now + seconds
            self.timeline.intervals.append(
                Interval(COMPUTE, "compute", name, action.chunk, phase, self.now, end)
            )
            self.now = end

    def _start(self, phase: str, message: Message, chunk: int) -> Interval:
        begin = max(self.now, self._free_at.get(message.group, 0.0))
        end = begin + self._rates.seconds_of(message)
        self._free_at[message.group] = end
        found = Interval(message.group, "communication", message.name, chunk, phase, begin, end)
        self.timeline.intervals.append(found)
        self.timeline.messages[phase].append(message)
        self.timeline.log.add(phase, Kind.START, message.name, chunk, round(message.given))
        return found

    def _finish(self, sent: Interval) -> None:
        self.timeline.log.add(sent.phase, Kind.FINISH, sent.name, sent.chunk)
        if sent.end > self.now:
            self.timeline.intervals.append(
                Interval(COMPUTE, "wait", sent.name, sent.chunk, sent.phase, self.now, sent.end)
            )
            self.now = sent.end
