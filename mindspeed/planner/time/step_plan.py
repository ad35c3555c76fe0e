"""Seconds of a step: its schedule simulated, then gradients reduced and the optimizer run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.pairs import pair_seconds
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.simulate import Simulation, simulate
from mindspeed.planner.count.recording import planned_step
from mindspeed.planner.shape import Shape

EXCHANGE = "exchange"
"""The name of an all-to-all among the ops of a stage."""

MOST_ACTIONS = 6_000
"""Longer steps repeat the middle of a shorter one."""


@dataclass(frozen=True)
class StageCosts(Costs):
    """Costs of actions whose stages differ in more than size.

    Attributes:
        of_stages: seconds of each op, by stage; of :data:`EXCHANGE` those of one of the four
            all-to-alls, which come on top where they are not hidden, if ``exchange`` is not 0.
        layers_of_stages: layers with such all-to-alls.
    """

    of_stages: tuple[Mapping[str, float], ...] = ()
    layers_of_stages: tuple[int, ...] = ()

    def seconds(self, plan: Plan, action: Action) -> float:
        """Seconds that ``action`` occupies its rank."""
        if action.microbatch is None:
            return 0.0
        known = self.of_stages[action.stage]
        found = known.get(action.op, 0.0)
        if self.exchange and action.op != "W":
            found += 2 * known.get(EXCHANGE, 0.0)
        return found * plan.size(action.microbatch)

    def pair_seconds(self, plan: Plan, forward: Action, backward: Action) -> float:
        """Seconds of a pair by its clock; of two stages the longer all-to-all decides."""
        ahead, behind = (self.of_stages[one.stage] for one in (forward, backward))
        weight = behind["W"] if backward.op == "B" else 0.0
        exchange = max(one.get(EXCHANGE, 0.0) for one in (ahead, behind))
        layers = max(1, *(self.layers_of_stages[one.stage] for one in (forward, backward)))
        times = ahead["F"], behind["I"], weight, exchange
        size = max(plan.size(one.microbatch or 0) for one in (forward, backward))
        return pair_seconds(*(time * size for time in times), layers, self.rows_again)


@dataclass(frozen=True)
class StepPlan:
    """A step of the pipeline.

    Attributes:
        short: plan of the step, or of a shorter one with the same peak memory.
        seconds: duration of the whole step.
        bubble: fraction of it in which the mean rank computes nothing useful.
        starts: seconds until the first action of each pipeline rank.
        idle: seconds from the last action of each pipeline rank to the end of the pipeline.
    """

    short: Plan
    seconds: float
    bubble: float
    starts: tuple[float, ...]
    idle: tuple[float, ...]


def step_plan(shape: Shape, costs: Costs) -> StepPlan:
    """Plan and simulate a step; a long step is extrapolated from two shorter ones.

    Raises:
        ConfigError: the schedule does not exist for this shape.
    """
    count, ranks, chunks = shape.micro_batches, shape.ranks, shape.chunks
    if ranks == 1:
        rows = tuple(Action(op, 0, i) for i in range(min(count, 2)) for op in "FB")
        plan = Plan(shape.placement, (rows,), min(count, 2))
        both = Action("F", 0, 0), Action("B", 0, 0)
        alone = sum(costs.seconds(plan, one) for one in both)
        further = costs.pair_seconds(plan, *both) if costs.exchange else alone
        return StepPlan(plan, alone + (count - 1) * further, 0.0, (0.0,), (0.0,))
    request = shape.request  # the row that runs: a schedule is not planned with these costs
    group = (request.group_size or ranks) if chunks > 1 else ranks  # messages have a latency
    enough = 2 * ranks + 2 * group
    long = 2 * ranks * chunks * count > MOST_ACTIONS and count > enough + group
    if not long or request.sizes is not None or request.plan is not None:
        plan = planned_step(request, ranks, chunks, count)
        whole = simulate(plan, costs)
        return StepPlan(plan, whole.makespan, whole.bubble, *_edges(whole))
    short = enough + (count - enough) % group
    plans = [planned_step(request, ranks, chunks, n) for n in (short, short + group)]
    first, second = (simulate(plan, costs) for plan in plans)
    steps = (count - short) / group
    seconds = first.makespan + steps * (second.makespan - first.makespan)
    useful = first.useful + steps * (second.useful - first.useful)
    bubble = 1 - useful / seconds if seconds else 0.0
    return StepPlan(plans[1], seconds, bubble, *_edges(second))


def _edges(found: Simulation) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds before the first and after the last action of each rank."""
    rows = [[one for one in row if one.action.microbatch is not None] for row in found.timeline]
    starts = tuple(row[0].start if row else 0.0 for row in rows)
    return starts, tuple(found.makespan - row[-1].end if row else 0.0 for row in rows)


@dataclass(frozen=True)
class DataParallel:
    """Seconds at the end of a step.

    Attributes:
        exposed: seconds of waiting for collectives of data-parallel groups.
        optimizer: seconds of everything else.
    """

    exposed: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """Sum of both."""
        return self.exposed + self.optimizer


def group_ranks(group: str, size: int, shape: Shape) -> tuple[int, ...]:
    """Ranks of rank 0's group in the job.

    Args:
        group: Megatron's description of the group.
        size: its size in a run on fewer devices, if it does not grow with the job.
    """
    stage = shape.devices // shape.ranks
    firsts = range(0, shape.devices, stage)
    if group.startswith("INTRA_DISTRIBUTED"):
        return tuple(range(shape.devices))
    if group.startswith("PIPELINE"):
        return tuple(firsts)
    if "EMBEDDING" in group:
        return (firsts[0], firsts[-1])
    if group.startswith("EXPERT_TENSOR_MODEL_PIPELINE"):
        inner = shape.expert * shape.expert_tensor
        return tuple(first + rank for first in firsts for rank in range(inner))
    if group == "MODEL_PARALLEL_GROUP":
        return tuple(first + rank for first in firsts for rank in range(shape.tensor))
    return tuple(range(size))


def dense_ranks(shape: Shape) -> tuple[int, ...]:
    """Ranks that hold the same dense parameters as rank 0."""
    count = shape.data_parallel * shape.context
    return tuple(range(0, count * shape.tensor, shape.tensor))


def expert_ranks(shape: Shape) -> tuple[int, ...]:
    """Ranks that hold the same experts as rank 0."""
    step = shape.expert * shape.expert_tensor
    return tuple(range(0, shape.data_parallel * shape.context * shape.tensor, step))
