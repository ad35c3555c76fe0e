"""Times of the steps of a program, over links and compute rates, without running them.

    line = simulate(program, costs, Rates(flops_per_second=300e12, links=lambda m: link))
    line.total, line.exposed()                   # seconds
    line.log.exposed("backward")                 # communications with no computation beside them

The program is the one that :func:`mindspeed.moe.interpreter.execute` runs; backward is its mirror
image. A computation occupies the compute stream. A communication starts when it is called, or when
the one before it on the same group has ended; finishing it moves the compute stream to its end.
These are the rules of :mod:`mindspeed.instruments.clock`, which watches the real layer.

:data:`PAIR` is one layer of Megatron's combined 1F1B, the forward of a micro-batch and the backward
of another:

    communication  combine(B)    dispatch(F)   dispatch(B)                        combine(F)
    computation    attention(F)  experts(B)    weight gradients(B), experts(F)    attention(B)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from mindspeed.instruments.timeline import Interval, Timeline
from mindspeed.moe.costs import BACKWARD, FORWARD, Computation, Costs, PassMessage, StageCosts
from mindspeed.moe.events import EventKind, EventLog
from mindspeed.moe.program import Phase, Program, Step

COMPUTE = "compute"
SIDE = ("shared", "shared_fc1", "shared_fc2", "anchor")  # once for all chunks


@dataclass(frozen=True)
class RankRates:
    """How fast one rank is.

    Attributes:
        flops_per_second: of matrix products.
        seconds_of: of a communication.
        bytes_per_second: of memory, for all other operators; None: they take no time.
    """

    flops_per_second: float
    seconds_of: Callable[[PassMessage], float]
    bytes_per_second: float | None = None

    def seconds(self, work: Computation) -> float:
        moving = 0.0 if self.bytes_per_second is None else work.bytes / self.bytes_per_second
        return work.flops / self.flops_per_second + moving


@dataclass
class Simulation:
    """The result of a simulation.

    Attributes:
        intervals: in the order in which they begin on the compute stream.
        log: the events that the interpreter would log.
        messages: by phase, in the order of their starts.
        ends: seconds at which the phases end.
    """

    intervals: list[Interval] = field(default_factory=list)
    log: EventLog = field(default_factory=EventLog)
    messages: dict[str, list[PassMessage]] = field(
        default_factory=lambda: {FORWARD: [], BACKWARD: []}
    )
    ends: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of both passes."""
        return max(self.ends.values())

    @property
    def lanes(self) -> Timeline:
        """Lanes of computation, and of each group of ranks; backward begins at the mark."""
        lanes = dict.fromkeys([COMPUTE, *(one.lane for one in self.intervals)])
        forward = self.ends[FORWARD]
        marks = (forward,) if forward < self.total else ()  # else both run at once
        return Timeline(self.intervals, tuple(lanes), marks=marks)

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
class ChunkStep:
    """A step of one chunk.

    Attributes:
        step: of the program, or its mirror image.
        costs: of its stage.
    """

    step: Step
    chunk: int
    costs: StageCosts


def simulate(
    program: Program,
    costs: Costs | Sequence[Costs],
    rates: RankRates,
    chunks: int = 1,
    inner: Mapping[str, Inner] | None = None,
    repeat: Callable[[list[ChunkStep]], list[ChunkStep]] | None = None,
) -> Simulation:
    """Run forward and backward of a program.

    Args:
        costs: Of every stage, for one chunk, or for each; stages that are missing are left out.
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


def play(actions: Iterable[tuple[str, ChunkStep]], rates: RankRates) -> Simulation:
    """Run actions in their order, each in its pass.

    Args:
        actions: (pass, action), of both passes.
    """
    run = _Run(rates)
    for phase, action in actions:
        run.take(phase, action)
        run.result.ends[phase] = run.now
    return run.result


def _actions(
    program: Program, costs: Sequence[Costs], inner: Mapping[str, Inner]
) -> Iterator[ChunkStep]:
    for chunk, step in program.for_chunks(len(costs)):
        if (within := inner.get(step.name)) is not None:
            yield from _actions(within.program, within.costs, {})
        if step.name in costs[chunk] and (step.name not in SIDE or chunk == 0):
            yield ChunkStep(step, chunk, costs[chunk][step.name])


def mirrored(actions: Sequence[ChunkStep]) -> Iterator[ChunkStep]:
    """The order in which autograd runs them: what finished in forward starts in backward."""
    turned = {Phase.START: Phase.FINISH, Phase.FINISH: Phase.START, Phase.COMPUTE: Phase.COMPUTE}
    for action in reversed(actions):
        step = Step(action.step.name, turned[action.step.phase])
        yield ChunkStep(step, action.chunk, action.costs)


class _Run:
    """The compute stream, the streams of groups, and what is in flight."""

    def __init__(self, rates: RankRates) -> None:
        self.now = 0.0
        self.result = Simulation()
        self._rates = rates
        self._free_at: dict[str, float] = {}
        self._flying: dict[tuple[str, str, int], list[Interval]] = {}

    def take(self, phase: str, action: ChunkStep) -> None:
        """One step in one pass."""
        costs, name = action.costs, action.step.name
        if action.step.phase is Phase.COMPUTE:
            messages = costs.messages if phase == FORWARD else costs.reverses
            for message in messages:  # one that is waited for at once
                self._finish(self._start(phase, message, action.chunk), action.chunk)
            self._compute(phase, action)
        elif action.step.phase is Phase.START:
            messages = costs.messages if phase == FORWARD else costs.reverses
            flying = [self._start(phase, message, action.chunk) for message in messages]
            self._flying[phase, name, action.chunk] = flying
        else:
            for interval in self._flying.pop((phase, name, action.chunk)):
                self._finish(interval, action.chunk)

    def _compute(self, phase: str, action: ChunkStep) -> None:
        costs = action.costs
        name = costs.logged or action.step.name
        work = costs.forward if phase == FORWARD else costs.backward
        if phase not in costs.silent:
            self.result.log.add(phase, EventKind.COMPUTE, name, action.chunk)
        if seconds := self._rates.seconds(work):
            end = self.now + seconds
            self._add(COMPUTE, "compute", name, self.now, end, phase, action.chunk)
            self.now = end

    def _start(self, phase: str, message: PassMessage, chunk: int) -> Interval:
        begin = max(self.now, self._free_at.get(message.group, 0.0))
        end = begin + self._rates.seconds_of(message)
        self._free_at[message.group] = end
        lane, kind = message.group, "communication"
        found = self._add(lane, kind, message.name, begin, end, phase, chunk)
        self.result.messages[phase].append(message)
        self.result.log.add(phase, EventKind.START, message.name, chunk, round(message.given))
        return found

    def _finish(self, sent: Interval, chunk: int) -> None:
        self.result.log.add(sent.phase, EventKind.FINISH, sent.name, chunk)
        if sent.end > self.now:
            self._add(COMPUTE, "wait", sent.name, self.now, sent.end, sent.phase, chunk)
            self.now = sent.end

    def _add(
        self, lane: str, kind: str, name: str, start: float, end: float, phase: str, chunk: int
    ) -> Interval:
        found = Interval(lane, kind, name, start, end, phase, (("chunk", chunk),))
        self.result.intervals.append(found)
        return found


PAIR = Program.parse(
    "b_unpermute b_combine> f_attn f_shared f_route f_count! f_permute f_dispatch> "
    "b_combine< b_scatter! b_disarrange b_experts b_arrange b_gather! b_dispatch> b_anchor "
    "f_dispatch< f_gather! f_arrange f_experts f_disarrange f_scatter! f_combine> "
    "b_dispatch< b_permute b_route b_shared b_attn f_combine< f_unpermute"
)
"""``b_combine>`` starts the reverse of the combine of the micro-batch that goes backward."""

_PASSES = {"f": FORWARD, "b": BACKWARD}


def simulate_pair(costs: Costs, rates: RankRates) -> Simulation:
    """Run a layer's forward and backward, of two micro-batches, at once.

    Args:
        costs: Of the stages of one micro-batch; stages that are missing are left out.
    """
    actions = []
    for step in PAIR.steps:
        direction, _, name = step.name.partition("_")
        if name in costs:
            actions.append((_PASSES[direction], ChunkStep(Step(name, step.phase), 0, costs[name])))
    return play(actions, rates)
