"""How much time less memory costs: the best schedules on a V, from the least memory upwards.

A search over building blocks (:mod:`blocks`), not over names: every block is woven within some
memory limits and priced. What no other beats in both time and memory makes the front.

    memory, in A    3.0   4.0   5.0   6.0   8.0       8 ranks, 16 micro-batches, F = I = W = 1;
    bubble         19.0  11.5   8.5   5.5   3.5       1F1B needs 8 A for a bubble of 21

Blocks are compared on few micro-batches, as the middle of a step repeats; those that win are woven
for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mindspeed.pipeline.schedule import orders
from mindspeed.pipeline.schedule.blocks import Block, Walk, candidates
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.fill import split_backwards, with_reductions
from mindspeed.pipeline.schedule.join import joined
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.simulate import Simulation, simulate
from mindspeed.pipeline.schedule.weave import FEW_WAYS, WeavingJob, least_memory, woven

_ROUNDING = 1e-9
_BEST = 3  # blocks that are woven for all micro-batches in every way


@dataclass(frozen=True)
class PricedPlan:
    """A plan and its price.

    Attributes:
        plan: with reductions.
        simulation: of it.
        origin: the building block, or the name of an order.
    """

    plan: Plan
    simulation: Simulation
    origin: str = ""

    @property
    def peak(self) -> float:
        """Activations of the fullest rank, in A."""
        return max(self.simulation.peak_memory)

    @property
    def time(self) -> float:
        """Time of a step, with the reduction that is not hidden."""
        return self.simulation.makespan + self.simulation.exposed_reduction

    def rank(self) -> tuple[float, float, int]:
        """Faster first; then less memory, then fewer split backwards."""
        return round(self.time, 6), round(self.peak, 6), self.simulation.counts["I"]


def priced(plan: Plan, costs: Costs, origin: str = "") -> PricedPlan:
    """``plan`` with reductions, and its price."""
    reduced = with_reductions(plan)
    return PricedPlan(reduced, simulate(reduced, costs), origin)


def filled(plan: Plan, costs: Costs, cap: float, origin: str = "") -> PricedPlan:
    """``plan`` with split backwards within a memory limit, and its price."""
    caps = [cap] * plan.placement.ranks
    return priced(joined(split_backwards(plan, costs, caps), costs), costs, origin)


@lru_cache(maxsize=8)
def front(ranks: int, job: WeavingJob) -> tuple[PricedPlan, ...]:
    """The schedules on a V that no other beats in both time and memory, least memory first."""
    found: dict[float, list[_Trial]] = {}
    for block, least in _blocks(ranks, job):
        for more in range(3):  # chunks above what the order needs
            cap = least + more / 2
            if cap <= ranks + _ROUNDING:
                found.setdefault(cap, []).append(_Trial(_estimate(block, job, cap), block))
    points = [
        _woven(trial.block, job, cap) for cap, trials in found.items() for trial in _best(trials)
    ]
    points += _known_orders(ranks, job)
    envelope: list[PricedPlan] = []
    for point in sorted(points, key=lambda one: (round(one.peak, 6), one.rank())):
        if not envelope or point.time < envelope[-1].time - 1e-6:
            envelope.append(point)
    return tuple(envelope)


@lru_cache(maxsize=8)
def within(ranks: int, job: WeavingJob, cap: float) -> PricedPlan | None:
    """The fastest schedule of a building block on a V that keeps at most ``cap``."""
    blocks = [block for block, least in _blocks(ranks, job) if least <= cap + _ROUNDING]
    bounds = [_least_time(block, job, cap) for block in blocks]
    trials: dict[int, _Trial] = {}
    for number in sorted(range(len(blocks)), key=bounds.__getitem__):
        if len(trials) >= _BEST and bounds[number] > _best(trials.values())[-1].time + _ROUNDING:
            break
        trials[number] = _Trial(_estimate(blocks[number], job, cap), blocks[number])
    tried = [trials[number] for number in sorted(trials)]
    found = [_woven(trial.block, job, cap) for trial in _best(tried)]
    return min(found, key=PricedPlan.rank, default=None)


def least(ranks: int, job: WeavingJob) -> tuple[float, Walk]:
    """Least memory that a building block needs on a V, in A, and the block."""
    return min(((needed, block.walk) for block, needed in _blocks(ranks, job)), key=_first)


def _first(pair: tuple[float, Walk]) -> float:
    return pair[0]


class _Trial(NamedTuple):
    """A block, and the estimated time of its step."""

    time: float
    block: Block


def _best(trials: Iterable[_Trial]) -> list[_Trial]:
    return sorted(trials, key=lambda trial: trial.time)[:_BEST]


@lru_cache(maxsize=8)
def _blocks(ranks: int, job: WeavingJob) -> list[tuple[Block, float]]:
    """Every block of which each rank can run all actions, and the memory that its order needs."""
    placement = Placement.snake(ranks, 2)
    short = job if job.sizes is not None else job.shortened(4 * ranks)
    blocks = [Block(placement, walk) for walk in candidates()]
    return [(block, least_memory(block, short)) for block in blocks if not block.collides]


def _least_time(block: Block, job: WeavingJob, cap: float) -> float:
    """What a step takes at least: a short one, and the work of further micro-batches but one."""
    m, short = job.num_microbatches, 2 * block.placement.ranks
    if m <= short or job.sizes is not None:
        return 0.0
    first = woven(block, job.shortened(short), cap, ways=FEW_WAYS).makespan
    return first + (m - short - 1) * job.costs.work


def _estimate(block: Block, job: WeavingJob, cap: float) -> float:
    """Time of a step; that of a long one goes on as two short ones began."""
    m, p = job.num_microbatches, block.placement.ranks
    if m <= 5 * p or job.sizes is not None:
        return woven(block, job, cap, ways=FEW_WAYS).makespan
    first, second = (
        woven(block, job.shortened(n * p), cap, ways=FEW_WAYS).makespan for n in (2, 3)
    )
    return second + (second - first) / p * (m - 3 * p)


def _woven(block: Block, job: WeavingJob, cap: float) -> PricedPlan:
    found = woven(block, job, cap, str(block.walk))
    return priced(joined(found.plan, job.costs), job.costs, str(block.walk))


def _known_orders(ranks: int, job: WeavingJob) -> Iterator[PricedPlan]:
    placement, m = Placement.snake(ranks, 2), job.num_microbatches
    for name, rows in v_orders(ranks, m, not job.whole):
        plan = Plan(placement, rows, m, job.sizes, name)
        whole = priced(plan, job.costs, name)
        yield whole
        if not job.whole and not whole.simulation.counts["I"]:
            yield filled(plan, job.costs, whole.peak, name)


def v_orders(ranks: int, m: int, split: bool) -> Iterator[tuple[str, orders.Rows]]:
    """The orders on a V that have a name."""
    yield "zb-v", orders.vee(ranks, m)
    if m >= 2 * ranks:
        yield "dualpipev", orders.dualpipev(ranks, m, split)
