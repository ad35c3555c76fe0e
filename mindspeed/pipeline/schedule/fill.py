"""Split backwards and put their weight gradients where a rank would idle.

The order of forwards and backwards of each rank is given and stays. Every backward, but for those
of pairs (:mod:`pairs`), becomes an I,
which the rank before waits for, and a W, which nobody waits for. All ranks are simulated, event by
event; a rank whose next action is not ready runs its oldest pending W instead.

One routine replaces hand-written schedules (cap: most activations of a rank):

    flush, k=1, v=1, cap p                  ZB-H1
    flush, k=2, v=1, cap 2p - 1             ZB-H2
    flush, k=1, v>1, cap p                  interleaved zero bubble
    flush, k=2, v>1, cap p + (p - 1) / v    nano-pipe, with the memory of interleaved 1F1B
    vee, cap p                              ZB-V

Source of the split: Qi et al., "Zero bubble pipeline parallelism" (2023).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARDS,
    REDUCE,
    Action,
)
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.plan import Plan


class Policy(NamedTuple):
    """Choice of the idle times that a weight gradient takes.

    Attributes:
        theta: those of at least theta times its own length.
        late: the same after the last forward of the rank; None: one W after each I instead, as the
            interleaved zero bubble schedule of torch does.
    """

    theta: float
    late: float | None


UNIFORM = (Policy(0, 0), Policy(0.25, 0.25), Policy(0.5, 0.5), Policy(1, 1))
POLICIES = (*UNIFORM, Policy(0.25, 0), Policy(1, 0.5), Policy(1, None))
_ROUNDING = 1e-9


def split_backwards(
    plan: Plan, costs: Costs, caps: Sequence[float], policies: Sequence[Policy] = POLICIES
) -> Plan:
    """``plan`` with weight gradients of their own, in the best of several ways.

    Args:
        plan: whole forwards and backwards only.
        costs: by which idle times are found.
        caps: most activations of each rank, in A.
        policies: the one with the shortest simulated step is taken, the first of several.

    Raises:
        ConfigError: the order itself needs more memory than ``caps`` allow.
    """
    best: _Filler | None = None
    bound = _lower_bound(plan, replace(costs, exchange=0.0))  # pairs hide what is exchanged
    for policy in policies:
        filler = _Filler(plan, costs, caps, policy)
        filler.run()
        if best is None or filler.makespan < best.makespan - _ROUNDING:
            best = filler
        if best.makespan <= bound + _ROUNDING:
            break
    assert best is not None
    return replace(plan, rows=tuple(map(tuple, best.filled)))


def _lower_bound(plan: Plan, costs: Costs) -> float:
    """No rank starts before the forwards on the way to it, nor ends before its work is done."""
    placement = plan.placement
    work = [0.0] * placement.ranks
    for rank, action in plan:
        work[rank] += costs.seconds(plan, action)
    first = plan.size(0)
    starts = [0.0]
    for stage in range(placement.num_stages - 1):
        crosses = placement.rank(stage) != placement.rank(stage + 1)
        forward = costs.forward * costs.share(plan, stage) * first
        starts.append(starts[-1] + forward + costs.latency * crosses)
    return max(
        starts[min(stages)] + done for stages, done in zip(placement.stages, work, strict=True)
    )


def with_reductions(plan: Plan) -> Plan:
    """``plan`` with a G right after the last gradient of each chunk."""
    return replace(plan, rows=tuple(map(_reduced, plan.rows)))


def _reduced(row: Sequence[Action]) -> tuple[Action, ...]:
    last = {action.stage: n for n, action in enumerate(row) if action.op in ("B", "W")}
    reduced: list[Action] = []
    for number, action in enumerate(row):
        reduced.append(action)
        if last.get(action.stage) == number:
            reduced.append(Action(REDUCE, action.stage))
    return tuple(reduced)


class _Filler:
    """The simulation of all ranks in the order of time."""

    def __init__(self, plan: Plan, costs: Costs, caps: Sequence[float], policy: Policy) -> None:
        p, self.m = plan.placement.ranks, plan.num_microbatches
        stages = plan.placement.num_stages
        self.plan, self.costs, self.caps, self.policy = plan, costs, caps, policy
        self.rank_of = [plan.placement.rank(stage) for stage in range(stages)]
        self.shares = [costs.share(plan, stage) for stage in range(stages)]
        self.sizes = [plan.size(i) for i in range(self.m)]
        # When the output of a forward and the gradient from a backward are there, per stage and
        # micro-batch.
        self.forward_end: list[float | None] = [None] * (stages * self.m)
        self.backward_end: list[float | None] = [None] * (stages * self.m)
        self.waiting: dict[tuple[bool, int], int] = {}
        self.position, self.memory = [0] * p, [0.0] * p
        self.last_forward = [
            max((n for n, action in enumerate(row) if action.op in FORWARDS), default=-1)
            for row in plan.rows
        ]
        self.pending: list[deque[tuple[int, int]]] = [deque() for _ in range(p)]
        self.left = [0] * stages  # backwards
        for _, action in plan:
            self.left[action.stage] += action.op not in FORWARDS
        self.makespan = 0.0
        self.filled: list[list[Action]] = [[] for _ in range(p)]
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in range(p)]

    def run(self) -> None:
        while self.events:
            now, rank = heappop(self.events)
            self._step(rank, now)

    def _step(self, rank: int, now: float) -> None:
        """What ``rank`` does at ``now``: its next action, a weight gradient, or it waits."""
        row, position = self.plan.rows[rank], self.position[rank]
        if position == len(row):
            while self.pending[rank]:
                now = self._weight_gradient(rank, now)
            self.makespan = max(self.makespan, now)
            return
        if row[position] in self.plan.paired:
            self._pair_step(rank, now, row[position], row[position + 1])
            return
        op, stage, i = row[position]
        assert i is not None
        forward = op in FORWARDS
        arrival, source = self._arrival(forward, stage, i, rank)
        pending, whole = bool(self.pending[rank]), not forward and self._keeps_more(rank, stage, i)
        forced = self._full(rank, stage, i) if forward else whole or self._in_turn(rank)
        if forced and pending:
            heappush(self.events, (self._weight_gradient(rank, now), rank))
        elif arrival is not None and arrival <= now:
            end = now + self._whole_seconds(stage, i) if whole else None
            heappush(self.events, (self._fixed(rank, now, forward, stage, i, end), rank))
        elif self.pending[rank] and self._long_enough(rank, now, arrival, forward, stage, i):
            heappush(self.events, (self._weight_gradient(rank, now), rank))
        elif arrival is not None:
            heappush(self.events, (arrival, rank))
        else:
            self.waiting[forward, source] = rank

    def _pair_step(self, rank: int, now: float, forward: Action, backward: Action) -> None:
        """The same for a pair, whose backward stays whole."""
        inputs = []
        for number, one in enumerate((forward, backward)):
            assert one.microbatch is not None
            inputs.append(self._arrival(number == 0, one.stage, one.microbatch, rank))
        missing = [(number, source) for number, (time, source) in enumerate(inputs) if time is None]
        arrival = None if missing else max(time or 0.0 for time, _ in inputs)
        _, stage, i = forward
        assert i is not None
        if self._full(rank, stage, i):
            heappush(self.events, (self._weight_gradient(rank, now), rank))
        elif arrival is not None and arrival <= now:
            end = now + self.costs.pair_seconds(self.plan, forward, backward)
            for one in (forward, backward):
                self._fixed(rank, now, one is forward, one.stage, one.microbatch or 0, end)
            heappush(self.events, (end, rank))
        elif self.pending[rank] and self._long_enough(rank, now, arrival, True, stage, i):
            heappush(self.events, (self._weight_gradient(rank, now), rank))
        elif arrival is not None:
            heappush(self.events, (arrival, rank))
        else:
            number, source = missing[0]
            self.waiting[number == 0, source] = rank

    def _arrival(self, forward: bool, stage: int, i: int, rank: int) -> tuple[float | None, int]:
        """Time at which the input is there, if that is known, and its source."""
        before = stage - 1 if forward else stage + 1
        if not 0 <= before < len(self.rank_of):
            return 0.0, -1
        source = before * self.m + i
        end = (self.forward_end if forward else self.backward_end)[source]
        if end is not None and self.rank_of[before] != rank:
            end += self.costs.latency
        return end, source

    def _full(self, rank: int, stage: int, i: int) -> bool:
        needed = self.memory[rank] + self.shares[stage] * self.sizes[i]
        if needed <= self.caps[rank] + _ROUNDING:
            return False
        if not self.pending[rank]:
            raise ConfigError(
                f"the schedule {self.plan.name} needs {needed:g} A of activations at "
                f"{stage}F{i} of rank {rank}; {self.caps[rank]:g} A are allowed"
            )
        return True

    def _keeps_more(self, rank: int, stage: int, i: int) -> bool:
        """Whether a weight gradient that waits would exceed the limit: it may keep more than the
        forward did, where layers are recomputed."""
        more = (self.costs.weight_share - 1) * self.shares[stage] * self.sizes[i]
        return more > 0 and self.memory[rank] + more > self.caps[rank] + _ROUNDING

    def _whole_seconds(self, stage: int, i: int) -> float:
        seconds = self.costs.input_gradient_alone + self.costs.weight_gradient
        return seconds * self.shares[stage] * self.sizes[i]

    def _in_turn(self, rank: int) -> bool:
        """Whether the policy wants a W right after the I that has just run."""
        return (
            self.policy.late is None
            and self.position[rank] > self.last_forward[rank]
            and bool(self.pending[rank])
            and self.filled[rank][-1].op == BACKWARD_INPUT
        )

    def _long_enough(
        self, rank: int, now: float, arrival: float | None, forward: bool, stage: int, i: int
    ) -> bool:
        """Whether the idle time is worth a weight gradient."""
        before_last = self.position[rank] <= self.last_forward[rank]
        theta = self.policy.theta if before_last else self.policy.late
        if not theta:
            return theta is not None
        if arrival is None:  # the action that makes the input has not even started
            before = stage - 1 if forward else stage + 1
            seconds = self.costs.forward_alone if forward else self.costs.input_gradient_alone
            arrival = now + seconds * self.shares[before] * self.sizes[i]
            arrival += self.costs.latency * (self.rank_of[before] != rank)
        first, j = self.pending[rank][0]
        needed = self.costs.weight_gradient * self.shares[first] * self.sizes[j]
        return arrival - now >= theta * needed - _ROUNDING

    def _fixed(
        self,
        rank: int,
        now: float,
        forward: bool,
        stage: int,
        i: int,
        together: float | None = None,
    ) -> float:
        """Run the next action; its end, or that of the pair or whole backward that it is in."""
        share = self.shares[stage] * self.sizes[i]
        source = stage * self.m + i
        self.position[rank] += 1
        alone = self.costs.forward_alone if forward else self.costs.input_gradient_alone
        end = now + alone * share if together is None else together
        if forward:
            self.forward_end[source] = end
            self.memory[rank] += share
            self.filled[rank].append(Action("F", stage, i))
        else:
            self.backward_end[source] = end
            self.left[stage] -= 1
            if together is None:
                self.memory[rank] -= (1 - self.costs.weight_share) * share
                self.filled[rank].append(Action(BACKWARD_INPUT, stage, i))
                self.pending[rank].append((stage, i))
            else:
                self.memory[rank] -= share
                self.filled[rank].append(Action(BACKWARD, stage, i))
            if not self.left[stage]:  # its reduction can start as soon as its last W has run
                self.pending[rank] = deque(
                    sorted(self.pending[rank], key=lambda one: one[0] != stage)
                )
        waiter = self.waiting.pop((forward, source), None)
        if waiter is not None:
            after = stage + 1 if forward else stage - 1
            other = self.rank_of[after] != rank
            heappush(self.events, (end + self.costs.latency * other, waiter))
        return end

    def _weight_gradient(self, rank: int, now: float) -> float:
        stage, i = self.pending[rank].popleft()
        share = self.shares[stage] * self.sizes[i]
        self.memory[rank] -= self.costs.weight_share * share
        self.filled[rank].append(Action(BACKWARD_WEIGHT, stage, i))
        return now + self.costs.weight_gradient * share
