"""The fastest of the known schedules that fits in memory, by simulation.

Candidates in a loop of stages: ``flush`` with several warm-ups k and with groups of p, 2 p, 4 p,
... and all micro-batches, then with sizes between the neighbours of the fastest; with whole
backwards and with weight gradients in idle times. On a V-shape: ``vee``, DualPipeV and every
building block (:mod:`front`). An order of another kind may be faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule import orders
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.front import Candidate, filled, least, priced, v_orders, within
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.weave import Job

WARMUPS = (1.0, 1.25, 1.5, 1.75, 2.0)
_ROUNDING = 1e-9
_BETWEEN = 8  # group sizes that are tried between two others


def fastest(
    placement: Placement,
    num_microbatches: int,
    costs: Costs,
    *,
    memory_limit: float | None = None,
    sizes: tuple[float, ...] | None = None,
    split: bool = True,
) -> Plan:
    """The plan with the shortest simulated step.

    Args:
        memory_limit: most activations of a rank, in A.
        sizes: of the micro-batches, where they differ.

    Raises:
        ConfigError: no candidate fits; names the least memory of all.
    """
    job = Job(num_microbatches, costs, sizes, whole=not split)
    search = _Search(placement, job, memory_limit)
    if placement.loops:
        search.loops()
    else:
        search.vees()
    if not search.found:
        raise ConfigError(search.nothing(placement.loops))
    return replace(min(search.found, key=Candidate.rank).plan, name="auto")


class _Search:
    """Prices of all candidates.

    Attributes:
        found: those that fit.
        least: memory of the smallest one, in A.
    """

    def __init__(self, placement: Placement, job: Job, limit: float | None) -> None:
        self.placement, self.job, self.limit = placement, job, limit
        self.found: list[Candidate] = []
        self.least = float("inf")
        self._seen: set[orders.Rows] = set()

    def loops(self) -> None:
        """Groups of all sizes, larger ones later: they need more memory."""
        p, v, m = self.placement.ranks, self.placement.chunks, self.job.num_microbatches
        coarse, times = _group_sizes(p, v, m), []
        for size in coarse:
            times.append(self._group(size))
            if self._at_bound():
                return
        best = times.index(min(times))
        near = coarse[max(best - 1, 0) : best + 2]
        between = [g for g in _distinct_groups(p, m, near[0], near[-1]) if g not in coarse]
        for size in between[:: max(1, math.ceil(len(between) / _BETWEEN))]:
            self._group(size)

    def vees(self) -> None:
        """Orders with a name, and what a search over building blocks finds."""
        ranks = self.placement.ranks
        for name, rows in v_orders(ranks, self.job.num_microbatches, not self.job.whole):
            self._rows(rows, name)
        if self.found and self._at_bound():
            return
        limit = self.limit if self.limit is not None else float(ranks)
        if (block := within(ranks, self.job, limit)) is not None:
            self.found.append(block)
        self.least = min(self.least, least(ranks, self.job)[0])

    def nothing(self, looped: bool) -> str:
        """Why no candidate fits, and what would."""
        ranks, m = self.placement.ranks, self.job.num_microbatches
        needed, walk = least(ranks, self.job)
        text = (
            f"no pipeline schedule of {m} micro-batches on {ranks} ranks fits in {self.limit:g} A "
            "of activations (--pipeline-memory-limit); the smallest one needs "
        )
        if not looped:
            return f"{text}{self.least:g} A (building block: {walk})"
        text += f"{self.least:g} A"
        if needed > (self.limit or 0.0) + _ROUNDING:
            return text
        return f"{text}; one on a V-shape fits: --pipeline-schedule v-auto"

    def _group(self, size: int) -> float:
        """Price groups of ``size``; the shortest time of those that fit."""
        p, v, m = self.placement.ranks, self.placement.chunks, self.job.num_microbatches
        known = len(self.found)
        for warmup in WARMUPS:
            self._rows(orders.flush(p, v, m, size, warmup))
        return min((one.time for one in self.found[known:]), default=float("inf"))

    def _rows(self, rows: orders.Rows, name: str = "auto") -> None:
        if rows in self._seen:
            return
        self._seen.add(rows)
        job = self.job
        plan = Plan(self.placement, rows, job.num_microbatches, job.sizes, name)
        whole = priced(plan, job.costs, name)
        self.least = min(self.least, whole.peak)
        if self.limit is not None and whole.peak > self.limit + _ROUNDING:
            return
        self.found.append(whole)
        if not job.whole and not whole.simulation.counts["I"]:
            caps = sorted({whole.peak, self.limit or whole.peak})
            split = [filled(plan, job.costs, cap, name) for cap in caps]
            self.found += [one for one in split if one.peak <= (self.limit or one.peak) + 1e-6]

    def _at_bound(self) -> bool:
        """Whether a candidate is as fast as any could be."""
        if not self.found:
            return False
        bound = _bound(self.found[0].plan, self.job.costs)
        return min(one.time for one in self.found) <= bound + _ROUNDING


def _bound(plan: Plan, costs: Costs) -> float:
    """Lower bound of a placement: each rank waits for its first input, then never again."""
    smallest = min(range(plan.num_microbatches), key=plan.size)
    last = plan.placement.ranks - 1
    start = sum(
        costs.seconds(plan, Action("F", stage, smallest)) + costs.latency for stage in range(last)
    )
    return start + sum(costs.seconds(plan, action) for action in plan.rows[last])


def _group_sizes(p: int, v: int, m: int) -> list[int]:
    """Larger groups hide more of the reduction and of the latency, for more memory."""
    if v == 1:
        return [p]
    sizes = [p]
    while 2 * sizes[-1] < m:
        sizes.append(2 * sizes[-1])
    return [*sizes, m] if sizes[-1] < m else sizes


def _distinct_groups(p: int, m: int, first: int, last: int) -> Iterator[int]:
    """Sizes between two others that divide the micro-batches differently."""
    seen = {orders.groups_of(m, size, p) for size in (first, last)}
    for size in range(first + 1, last):
        groups = orders.groups_of(m, size, p)
        if groups not in seen:
            seen.add(groups)
            yield size
