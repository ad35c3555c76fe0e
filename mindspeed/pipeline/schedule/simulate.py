"""What a schedule costs: its time line, bubble, memory and messages, without executing it.

A rank runs its row in order. An action starts when the rank is free and its input has arrived:
the end of the action that makes it, plus the latency between two ranks. Reductions (G) and copies
(O, L) run beside the row, each kind one after another on a stream of its own.

    simulation = simulate(plan, Costs(latency=0.1))
    simulation.bubble, simulation.peak_memory, simulation.exposed_reduction
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from mindspeed.errors import ConfigError
from mindspeed.instruments.timeline import Interval, Timeline
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.plan import Plan


class TimedAction(NamedTuple):
    """Action with its start and end, in the unit of the costs."""

    action: Action
    start: float
    end: float

    def interval(self, lane: str, placement: Placement) -> Interval:
        """The action on a lane of a timeline."""
        op, stage, microbatch = self.action
        details = (
            ("stage", stage),
            ("chunk", placement.chunk(stage)),
            ("micro-batch", microbatch),
        )
        return Interval(lane, op, str(self.action), self.start, self.end, details=details)


@dataclass(frozen=True)
class Simulation:
    """The run of a plan.

    Attributes:
        plan: that ran.
        costs: it ran with.
        timeline: for each rank its row with times; G, O and L show when they are issued.
        background: for each rank the reductions and copies, on their own streams.
        peak_memory: for each rank the most activations alive, in A: one micro-batch over all
            stages of a rank.
        peak_chunks: for each rank the most (stage, micro-batch) pairs whose activations are alive.
    """

    plan: Plan
    costs: Costs
    timeline: tuple[tuple[TimedAction, ...], ...]
    background: tuple[tuple[TimedAction, ...], ...]
    peak_memory: tuple[float, ...]
    peak_chunks: tuple[int, ...]

    @cached_property
    def makespan(self) -> float:
        """T: from the start of the first rank to the end of the last one."""
        return max((row[-1].end for row in self.timeline if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time in which each rank computes, recomputation included."""
        return tuple(sum(end - start for _, start, end in row) for row in self.timeline)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Rest of the makespan on each rank."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def useful(self) -> float:
        """Mean over the ranks of the time in which it computes what has to be computed.

        Collectives of layers are not part of it: where they are not hidden, they are bubble.
        """
        if self.plan.paired or self.costs.exchange:
            alone = replace(self.costs, exchange=0.0)
            needed = (alone.seconds(self.plan, one) for _, one in self.plan if one.op != "R")
            return sum(needed) / len(self.timeline)
        wasted = sum(
            end - start for row in self.timeline for action, start, end in row if action.op == "R"
        )
        return (sum(self.busy) - wasted) / len(self.timeline)

    @cached_property
    def bubble_time(self) -> float:
        """Makespan less the useful time; recomputation counts as bubble."""
        return self.makespan - self.useful

    @cached_property
    def bubble(self) -> float:
        """Fraction of a synchronous step in which the mean rank does nothing useful."""
        return self.bubble_time / self.makespan if self.makespan else 0.0

    @cached_property
    def exposed_reduction(self) -> float:
        """Time of the data-parallel reduction after the end of the last rank.

        A chunk without ``G`` is reduced when its rank has finished.
        """
        end = self.makespan
        for rank, stages in enumerate(self.plan.placement.stages):
            stream = [one for one in self.background[rank] if one.action.op == "G"]
            covered = {one.action.stage for one in stream}
            rest = sum(self.costs.share(self.plan, s) for s in stages if s not in covered)
            free = stream[-1].end if stream else 0.0
            if rest:
                row = self.timeline[rank]
                free = max(free, row[-1].end if row else 0.0) + rest * self.costs.reduction
            end = max(end, free)
        return end - self.makespan

    @cached_property
    def messages(self) -> dict[tuple[int, int], int]:
        """Number of messages of each (source, target)."""
        return {ends: len(transfers) for ends, transfers in self.plan.channels.items()}

    @cached_property
    def counts(self) -> Counter[str]:
        """Number of actions per op: R is recomputed chunks, I split backwards."""
        return Counter(action.op for _, action in self.plan)

    @cached_property
    def lanes(self) -> Timeline:
        """A lane for each rank, and a thin one for its reductions and copies."""
        intervals, thin, placement = [], {}, self.plan.placement
        for rank, rows in enumerate(zip(self.timeline, self.background, strict=True)):
            thin[f"{rank}, background"] = f"{rank}"
            for lane, row in zip((f"{rank}", f"{rank}, background"), rows, strict=True):
                intervals += [one.interval(lane, placement) for one in row if one.end > one.start]
        lanes = [lane for pair in thin.items() for lane in reversed(pair)]
        return Timeline(intervals, lanes, "rank", thin, (self.makespan,))


def simulate(plan: Plan, costs: Costs | None = None) -> Simulation:
    """Run ``plan``.

    Raises:
        ConfigError: a rank waits for something that never comes.
    """
    costs = costs or Costs()
    run = _Run(plan, costs)
    run.all_ranks()
    return Simulation(
        plan,
        costs,
        tuple(map(tuple, run.timeline)),
        tuple(map(tuple, run.background)),
        tuple(run.peak_memory),
        tuple(run.peak_chunks),
    )


def unpaired_note(plan: Plan, costs: Costs) -> str:
    """The sentence on a plan whose pairs run one after the other: what they would cost as pairs."""
    alone, pairs = (simulate(one, costs).makespan for one in (plan.without_pairs(), plan))
    more = f"{abs(pairs / alone - 1):.1%} {'longer' if pairs > alone else 'shorter'}"
    return (
        f"its {len(plan.paired)} pairs run one member after the other, as there is no collective "
        f"that they hide; as pairs they would make a step {more}"
    )


def _part_of_forward(costs: Costs, backward: Action) -> float:
    weight = costs.weight_gradient if backward.op == "B" else 0.0
    return costs.forward / (costs.forward + costs.input_gradient + weight)


class _Run:
    """The state of all ranks; :meth:`all_ranks` runs each as far as its inputs are there."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        p, stages = plan.placement.ranks, plan.placement.num_stages
        self.plan, self.costs = plan, costs
        self.rank_of = [plan.placement.rank(stage) for stage in range(stages)]
        # End of a forward, an input gradient and so on: (op, stage, micro-batch) -> time.
        self.ends: dict[tuple[str, int, int | None], float] = {}
        self.waiting: dict[tuple[str, int, int | None], int] = {}  # -> rank
        self.position, self.clock = [0] * p, [0.0] * p
        self.copies, self.reductions = [0.0] * p, [0.0] * p  # when the streams are free
        self.timeline: list[list[TimedAction]] = [[] for _ in range(p)]
        self.background: list[list[TimedAction]] = [[] for _ in range(p)]
        self.memory, self.peak_memory = [0.0] * p, [0.0] * p
        self.chunks, self.peak_chunks = [0] * p, [0] * p
        self.copied: list[list[tuple[float, float]]] = [[] for _ in range(p)]  # (end of O, memory)
        self.input_only: set[tuple[int, int | None]] = set()
        self.offloaded: set[tuple[int, int | None]] = set()
        self.shares = [costs.share(plan, stage) for stage in range(stages)]
        self.seconds = {
            (op, stage): costs.seconds(plan, Action(op, stage, 0)) / plan.size(0)
            for op in ("F", "Fc", "R", "B", "I", "W")
            for stage in range(stages)
        }

    def all_ranks(self) -> None:
        ready = list(range(len(self.position)))
        while ready:
            rank = ready.pop()
            ready += self._advance(rank)
        stuck = [r for r, row in enumerate(self.plan.rows) if self.position[r] < len(row)]
        if stuck:
            actions = ", ".join(f"rank {r} at {self.plan.rows[r][self.position[r]]}" for r in stuck)
            raise ConfigError(f"the pipeline schedule {self.plan.name} stops: {actions}")

    def _advance(self, rank: int) -> list[int]:
        """Run the row of ``rank`` until an input is missing; the ranks that it woke."""
        row, woken, last = self.plan.rows[rank], [], len(self.rank_of) - 1
        ends, rank_of, latency = self.ends, self.rank_of, self.costs.latency
        while self.position[rank] < len(row):
            position = self.position[rank]
            action = row[position]
            if action in self.plan.paired:
                found = self._pair(rank, action, row[position + 1])
                if found is None:
                    break
                woken += found
                continue
            op, stage, i = action
            start, source = self.clock[rank], None
            if op == "F" or op == "Fc":
                if stage > 0:
                    source = ("F", stage - 1, i)
            elif op == "B" or op == "I":
                own = "R" if (stage, i) in self.input_only else "F"
                if (own, stage, i) not in ends:
                    break
                if stage < last:
                    source = ("I", stage + 1, i)
            elif op == "W":
                source = ("L" if (stage, i) in self.offloaded else "I", stage, i)
            elif op != "G":
                source = ({"R": "F", "O": "I", "L": "O"}[op], stage, i)
            if source is not None:
                end = ends.get(source)
                if end is None:
                    self.waiting[source] = rank
                    break
                if op != "O" and op != "L":
                    other = rank_of[source[1]] != rank
                    start = max(start, end + latency if other else end)
            self.position[rank] = position + 1
            end = self._run(rank, action, start)
            key = ("F" if op == "Fc" else "I" if op == "B" else op, stage, i)
            ends[key] = end
            if key in self.waiting:
                woken.append(self.waiting.pop(key))
        return woken

    def _pair(self, rank: int, forward: Action, backward: Action) -> list[int] | None:
        """Run two actions at once; the ranks that this wakes, None while an input is missing."""
        start, last = self.clock[rank], len(self.rank_of) - 1
        sources = [("F", forward.stage - 1, forward.microbatch)] if forward.stage else []
        if backward.stage < last:
            sources.append(("I", backward.stage + 1, backward.microbatch))
        for source in sources:
            if source not in self.ends:
                self.waiting[source] = rank
                return None
            other = self.rank_of[source[1]] != rank
            start = max(start, self.ends[source] + self.costs.latency * other)
        if ("F", *backward[1:]) not in self.ends:
            return None
        end = start + self.costs.pair_seconds(self.plan, forward, backward)
        self._run(rank, forward, start)
        self._run(rank, backward, start)
        # One after the other in the picture and for the time in which the rank computes.
        middle = start + (end - start) * _part_of_forward(self.costs, backward)
        self.timeline[rank][-2:] = [
            TimedAction(forward, start, middle),
            TimedAction(backward, middle, end),
        ]
        self.clock[rank] = end
        self.position[rank] += 2
        keys = ("F", *forward[1:]), ("I", *backward[1:])
        self.ends |= dict.fromkeys(keys, end)
        return [self.waiting.pop(key) for key in keys if key in self.waiting]

    def _run(self, rank: int, action: Action, start: float) -> float:
        """Book time and memory of an action; when its result is there."""
        op, stage, i = action
        size = 1.0 if i is None else self.plan.size(i)
        share = self.shares[stage] * size
        if op in "GOL":
            self.timeline[rank].append(TimedAction(action, start, start))
            return self._in_background(rank, action, start, share)
        end = start + self.seconds[op, stage] * size
        self.timeline[rank].append(TimedAction(action, start, end))
        self.clock[rank] = end
        kept = self.costs.input_share
        if op == "F":
            self._allocate(rank, start, share, 1)
        elif op == "Fc":
            self.input_only.add((stage, i))
            self._allocate(rank, start, kept * share, 0)
        elif op == "R":
            self._allocate(rank, start, (1 - kept) * share, 1)
        elif op == "I":
            self.memory[rank] -= (1 - self.costs.weight_share) * share
            self.peak_memory[rank] = max(self.peak_memory[rank], self.memory[rank])
        else:  # B or W
            self.memory[rank] -= share if op == "B" else self.costs.weight_share * share
            self.chunks[rank] -= 1
        return end

    def _in_background(self, rank: int, action: Action, start: float, share: float) -> float:
        if action.op == "G":
            stream, length = self.reductions, self.costs.reduction * share
        else:
            stream, length = self.copies, self.costs.transfer * share
        start = max(start, stream[rank])
        end = stream[rank] = start + length
        self.background[rank].append(TimedAction(action, start, end))
        kept = self.costs.weight_share * share
        if action.op == "O":
            self.offloaded.add((action.stage, action.microbatch))
            self.copied[rank].append((end, kept))
        elif action.op == "L":
            self._allocate(rank, start, kept, 1)
        return end

    def _allocate(self, rank: int, now: float, memory: float, chunks: int) -> None:
        """Take memory; what has been copied to the host by now is free."""
        copied = self.copied[rank]
        while copied and copied[0][0] <= now:
            self.memory[rank] -= copied.pop(0)[1]
            self.chunks[rank] -= 1
        self.memory[rank] += memory
        self.chunks[rank] += chunks
        self.peak_memory[rank] = max(self.peak_memory[rank], self.memory[rank])
        self.peak_chunks[rank] = max(self.peak_chunks[rank], self.chunks[rank])
