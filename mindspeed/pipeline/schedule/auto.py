"""The fastest of the known schedules that fits in memory, by simulation.

Candidates: every order of the stages' placement (``flush`` with several warm-ups k and with groups
of p, 2 p, 4 p, ... and all micro-batches; on a V-shape ``vee`` and DualPipeV), with whole backwards
and with weight gradients in idle times. An order of another kind may be faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule import orders
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.fill import split_backwards, with_reductions
from mindspeed.pipeline.schedule.join import joined
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.simulate import simulate

WARMUPS = (1.0, 1.25, 1.5, 1.75, 2.0)
_ROUNDING = 1e-9


@dataclass(frozen=True)
class _Candidate:
    plan: Plan
    peak: float  # of the worst rank, in A
    time: float  # of a step, with the reduction that is not hidden

    def rank(self) -> tuple[float, float, int]:
        """Faster first; then less memory, then fewer split backwards."""
        split = sum(action.op == "I" for _, action in self.plan)
        return round(self.time, 6), round(self.peak, 6), split


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
    found: list[_Candidate] = []
    least = float("inf")
    for group in _orders(placement, num_microbatches, split):
        for rows in group:
            plan = Plan(placement, rows, num_microbatches, sizes, "auto")
            whole = _priced(with_reductions(plan), costs)
            least = min(least, whole.peak)
            if memory_limit is not None and whole.peak > memory_limit + _ROUNDING:
                continue
            found.append(whole)
            if split and all(action.op != "I" for _, action in plan):
                caps = {whole.peak, memory_limit or whole.peak}
                found += [_filled(plan, costs, cap) for cap in sorted(caps)]
        if found and min(one.time for one in found) <= _bound(found[0].plan, costs) + _ROUNDING:
            break
    if not found:
        raise ConfigError(
            f"no pipeline schedule of {num_microbatches} micro-batches on {placement.ranks} ranks "
            f"fits in {memory_limit:g} A of activations (--pipeline-memory-limit); the smallest "
            f"one needs {least:g} A"
        )
    return min(found, key=_Candidate.rank).plan


def _orders(placement: Placement, m: int, split: bool) -> Iterator[list[orders.Rows]]:
    """Orders of about the same memory together, those that need more of it later."""
    p, v = placement.ranks, placement.chunks
    if placement != Placement.loop(p, v):
        yield [orders.vee(p, m), *([orders.dualpipev(p, m, split)] if m >= 2 * p else [])]
        return
    seen: set[orders.Rows] = set()
    for g in _groups(p, v, m):
        new = dict.fromkeys(orders.flush(p, v, m, g, k) for k in WARMUPS)
        yield [rows for rows in new if rows not in seen]
        seen |= new.keys()


def _bound(plan: Plan, costs: Costs) -> float:
    """Lower bound of a placement: each rank waits for its first input, then never again."""
    smallest = min(range(plan.num_microbatches), key=plan.size)
    last = plan.placement.ranks - 1
    start = sum(
        costs.seconds(plan, Action("F", stage, smallest)) + costs.latency for stage in range(last)
    )
    return start + sum(costs.seconds(plan, action) for action in plan.rows[last])


def _groups(p: int, v: int, m: int) -> Sequence[int]:
    """Larger groups hide more of the reduction and of the latency, for more memory."""
    if v == 1:
        return [p]
    sizes = [p]
    while 2 * sizes[-1] < m:
        sizes.append(2 * sizes[-1])
    return [*sizes, m] if sizes[-1] < m else sizes


def _filled(plan: Plan, costs: Costs, cap: float) -> _Candidate:
    caps = [cap] * plan.placement.ranks
    filled = joined(split_backwards(plan, costs, caps), costs)
    return _priced(with_reductions(filled), costs)


def _priced(plan: Plan, costs: Costs) -> _Candidate:
    simulation = simulate(plan, costs)
    time = simulation.makespan + simulation.exposed_reduction
    return _Candidate(plan, max(simulation.peak_memory), time)
