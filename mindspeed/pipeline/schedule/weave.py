"""Rows of all ranks from a building block: one pass over simulated time within a memory limit.

Repeating a block gives every forward and backward of a rank a place in an order. A rank that is
free takes the first one in this order whose input has arrived and that leaves room for those before
it: a late message then delays nothing else. Weight gradients go where a rank would wait, and where
a forward needs the memory that they keep.

No rank waits for ever: of all actions that have not run, the first in the order has its inputs, is
the first of its rank, and fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, product
from typing import NamedTuple

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, Action
from mindspeed.pipeline.schedule.blocks import Block
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.fill import Policy
from mindspeed.pipeline.schedule.plan import Plan

_ROUNDING = 1e-9


class Way(NamedTuple):
    """How a block is woven.

    Attributes:
        policy: which idle times a weight gradient takes.
        reorder: an action may run before others of its rank whose inputs are missing.
    """

    policy: Policy
    reorder: bool = True


_THETAS = ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0))
WAYS = tuple(Way(Policy(*both), reorder) for both, reorder in product(_THETAS, (True, False)))
FEW_WAYS = (Way(Policy(0, 0)), Way(Policy(1, 0)))


class WeavingJob(NamedTuple):
    """What a block is woven for.

    Attributes:
        num_microbatches: m.
        costs: by which actions are placed.
        sizes: of the micro-batches, where they differ.
        whole: backwards are not split.
    """

    num_microbatches: int
    costs: Costs
    sizes: tuple[float, ...] | None = None
    whole: bool = False

    def shortened(self, num_microbatches: int) -> WeavingJob:
        """The same with at most so many micro-batches, which are equal."""
        return self._replace(num_microbatches=min(self.num_microbatches, num_microbatches))


class Woven(NamedTuple):
    """A plan and what it takes, as the pass over time has found.

    Attributes:
        plan: rows without reductions.
        makespan: from the first start to the last end.
        peak: activations of the fullest rank, in A.
    """

    plan: Plan
    makespan: float
    peak: float


def least_memory(block: Block, job: WeavingJob) -> float:
    """Activations that the order of a block needs on the fullest rank, in A."""
    return max(max(_levels(entries)) for entries in _entries(block, job))


def woven(
    block: Block, job: WeavingJob, cap: float, name: str = "", ways: Sequence[Way] = WAYS
) -> Woven:
    """The shortest of several ways to weave ``block``, of equally short ones that of least memory.

    Args:
        block: to be repeated.
        job: what for.
        cap: most activations of a rank, in A.
        name: of the plan.
        ways: to be tried.

    Raises:
        ConfigError: the order of the block needs more memory than ``cap``.
    """
    best: Woven | None = None
    entries = _entries(block, job)
    for way in ways:
        loom = _Loom(block, job, cap, way, entries)
        loom.run()
        rows = tuple(map(tuple, loom.rows))
        plan = Plan(block.placement, rows, job.num_microbatches, job.sizes, name)
        found = Woven(plan, max(loom.busy), max(loom.peak))
        if best is None or (found.makespan + _ROUNDING, found.peak) < (best.makespan, best.peak):
            best = found
    assert best is not None
    return best


class _Entry(NamedTuple):
    """A forward or backward of a rank and the memory that it takes or frees."""

    slot: int
    forward: bool
    stage: int
    microbatch: int
    change: float


def _levels(entries: list[_Entry]) -> Iterator[float]:
    """Memory after each of them, in A."""
    return accumulate(entry.change for entry in entries)


class _Order:
    """The forwards and backwards of one rank in the order of a block."""

    def __init__(self, entries: list[_Entry]) -> None:
        self.entries = entries
        self.ran = [False] * len(entries)
        self.first = 0  # that has not run
        self.kinds: dict[tuple[bool, int], deque[int]] = {}  # (forward, stage) -> places
        for place, entry in enumerate(entries):
            self.kinds.setdefault((entry.forward, entry.stage), deque()).append(place)
        self.forwards = sum(entry.forward for entry in entries)
        self.least = max(_levels(entries))

    def next_of_each_kind(self) -> list[int]:
        return sorted(places[0] for places in self.kinds.values() if places)

    def take(self, place: int) -> _Entry:
        entry = self.entries[place]
        self.kinds[entry.forward, entry.stage].popleft()
        self.forwards -= entry.forward
        self.ran[place] = True
        while self.first < len(self.ran) and self.ran[self.first]:
            self.first += 1
        return entry

    def fits(self, place: int, level: float, cap: float) -> bool:
        """Whether those before ``place`` still fit when it runs now."""
        level += self.entries[place].change
        if level > cap:
            return False
        for number in range(self.first, place):
            if not self.ran[number]:
                level += self.entries[number].change
                if level > cap:
                    return False
        return True


def _entries(block: Block, job: WeavingJob) -> list[list[_Entry]]:
    """Forwards and backwards of each rank, in order."""
    shares, sizes = _shares(block, job), _sizes(job)
    found = []
    for stages in block.placement.stages:
        entries = []
        for stage in stages:
            for i, size in enumerate(sizes):
                later, share = i * block.walk.period, shares[stage] * size
                entries.append(_Entry(block.forward[stage] + later, True, stage, i, share))
                entries.append(_Entry(block.backward[stage] + later, False, stage, i, -share))
        found.append(sorted(entries))
    return found


def _shares(block: Block, job: WeavingJob) -> list[float]:
    plan = Plan(block.placement, (), job.num_microbatches)
    return [job.costs.share(plan, stage) for stage in range(block.placement.num_stages)]


def _sizes(job: WeavingJob) -> tuple[float, ...]:
    return job.sizes or (1.0,) * job.num_microbatches


class _Loom:
    """The simulation of all ranks in the order of time."""

    def __init__(
        self, block: Block, job: WeavingJob, cap: float, way: Way, entries: list[list[_Entry]]
    ) -> None:
        placement = block.placement
        p, self.last = placement.ranks, placement.num_stages - 1
        self.job, self.costs, self.way = job, job.costs, way
        self.rank_of = [placement.rank(stage) for stage in range(placement.num_stages)]
        self.shares, self.sizes = _shares(block, job), _sizes(job)
        self.orders = list(map(_Order, entries))
        needed = max(order.least for order in self.orders)
        if needed > cap + _ROUNDING:
            raise ConfigError(
                f"the order of the building block ({block.walk}) needs {needed:g} A of "
                f"activations; {cap:g} A are allowed"
            )
        self.cap = cap + _ROUNDING
        self.ends: dict[tuple[bool, int, int], float] = {}
        self.memory, self.peak = [0.0] * p, [0.0] * p
        self.floor = [0.0] * p  # memory if every weight gradient ran at once
        self.pending: list[deque[tuple[int, int]]] = [deque() for _ in range(p)]
        self.rows: list[list[Action]] = [[] for _ in range(p)]
        self.busy = [0.0] * p
        self.events = [(0.0, rank) for rank in range(p)]
        heapify(self.events)

    def run(self) -> None:
        while self.events:
            now, rank = heappop(self.events)
            if self.busy[rank] <= now + _ROUNDING:
                self._step(rank, now)

    def _step(self, rank: int, now: float) -> None:
        """What ``rank`` does at ``now``: an action, a weight gradient, or it waits."""
        order, soon = self.orders[rank], None
        if order.first < len(order.entries):
            soon = self._arrival(order.entries[order.first])
            if self._runs(rank, order.first, soon, now):
                self._main(rank, order.first, now)
                return
            for place in order.next_of_each_kind()[1:] if self.way.reorder else ():
                if self._runs(rank, place, self._arrival(order.entries[place]), now):
                    self._main(rank, place, now)
                    return
            if soon is not None and soon <= now + _ROUNDING:
                soon = None  # it waits for memory
        if self.pending[rank] and self._long_enough(rank, now, soon):
            self._weight_gradient(rank, now)

    def _runs(self, rank: int, place: int, arrival: float | None, now: float) -> bool:
        """Whether an action of a rank can run now."""
        if arrival is None or arrival > now + _ROUNDING:
            return False
        order = self.orders[rank]
        forward = order.entries[place].forward
        return not forward or order.fits(place, self.floor[rank], self.cap)

    def _arrival(self, entry: _Entry) -> float | None:
        """Time at which the inputs are there, if that is known."""
        _, forward, stage, i, _ = entry
        if not forward and (True, stage, i) not in self.ends:
            return None
        if stage == (0 if forward else self.last):
            return 0.0 if forward else self.ends[True, stage, i]
        before = stage - 1 if forward else stage + 1
        end = self.ends.get((forward, before, i))
        if end is None:
            return None
        other = self.rank_of[before] != self.rank_of[stage]
        return end + (self.costs.latency if other else 0.0)

    def _long_enough(self, rank: int, now: float, soon: float | None) -> bool:
        """Whether the idle time is worth a weight gradient."""
        policy = self.way.policy
        theta = policy.theta if self.orders[rank].forwards else policy.late
        stage, i = self.pending[rank][0]
        gate = (theta or 0.0) * self.costs.weight_gradient * self.shares[stage] * self.sizes[i]
        return not gate or soon is None or soon - now >= gate - _ROUNDING

    def _main(self, rank: int, place: int, now: float) -> None:
        """Run a forward or backward, or first the weight gradient whose memory it needs."""
        _, forward, stage, i, change = self.orders[rank].entries[place]
        share, whole = abs(change), self.job.whole
        taken = share if forward else (self.costs.weight_share * (not whole) - 1.0) * share
        if self.memory[rank] + taken > self.cap:
            if self.pending[rank]:
                self._weight_gradient(rank, now)
                return
            if not forward:  # what waits may keep more than the forward did
                whole, taken = True, -share
        self.orders[rank].take(place)
        self.floor[rank] += change
        self.memory[rank] += taken
        self.peak[rank] = max(self.peak[rank], self.memory[rank])
        seconds = self.costs.forward_alone if forward else self.costs.input_gradient_alone
        if forward:
            op = "F"
        elif whole:
            op, seconds = BACKWARD, seconds + self.costs.weight_gradient
        else:
            op = BACKWARD_INPUT
            self.pending[rank].append((stage, i))
            if not self.orders[rank].kinds[False, stage]:  # its reduction can start early
                self.pending[rank] = deque(
                    sorted(self.pending[rank], key=lambda one: one[0] != stage)
                )
        self.rows[rank].append(Action(op, stage, i))
        self.ends[forward, stage, i] = self._until(rank, now + seconds * share)
        after = stage + 1 if forward else stage - 1
        if 0 <= after <= self.last and (other := self.rank_of[after]) != rank:
            heappush(self.events, (self.busy[rank] + self.costs.latency, other))

    def _weight_gradient(self, rank: int, now: float) -> None:
        stage, i = self.pending[rank].popleft()
        share = self.shares[stage] * self.sizes[i]
        self.memory[rank] -= self.costs.weight_share * share
        self.rows[rank].append(Action(BACKWARD_WEIGHT, stage, i))
        self._until(rank, now + self.costs.weight_gradient * share)

    def _until(self, rank: int, end: float) -> float:
        self.busy[rank] = end
        heappush(self.events, (end, rank))
        return end
