"""The actions of a step and how long they take together: the schedule of a job, simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import build_plan
from mindspeed.pipeline.schedule.simulate import simulate
from mindspeed.planner.shape import Shape

Actions = Mapping[tuple[str, int], float]
"""How many of each op and stage."""

MOST_ACTIONS = 6_000
"""Longer steps repeat the middle of a shorter one."""


@dataclass(frozen=True)
class StageCosts(Costs):
    """Costs of actions whose stages differ in more than size.

    Attributes:
        of_stages: for each stage the seconds of each op.
    """

    of_stages: tuple[Mapping[str, float], ...] = ()

    def seconds(self, plan: Plan, action: Action) -> float:
        """How long ``action`` occupies its rank."""
        if action.microbatch is None:
            return 0.0
        return self.of_stages[action.stage].get(action.op, 0.0) * plan.size(action.microbatch)


@dataclass(frozen=True)
class StepPlan:
    """A step of the pipeline.

    Attributes:
        short: plan of the step or of a shorter one with the same fullest moments.
        seconds: of the whole step.
        bubble: part of them.
        actions: how many of each op and stage every pipeline rank executes in the whole step.
    """

    short: Plan
    seconds: float
    bubble: float
    actions: tuple[Actions, ...]


def step_plan(shape: Shape, costs: Costs) -> StepPlan:
    """The plan of a step, simulated; a long step is continued from two shorter ones.

    Args:
        shape: of the job.
        costs: seconds of its actions.

    Raises:
        ConfigError: the schedule does not exist for this shape.
    """
    count, ranks, chunks = shape.micro_batches, shape.ranks, shape.chunks
    if ranks == 1:
        rows = tuple(Action(op, 0, i) for i in range(min(count, 2)) for op in "FB")
        plan = Plan(shape.placement, (rows,), min(count, 2))
        one = sum(costs.seconds(plan, Action(op, 0, 0)) for op in "FB")
        return StepPlan(plan, count * one, 0.0, ({(op, 0): float(count) for op in "FB"},))
    request = replace(shape.request, costs=costs)
    group = (request.group_size or ranks) if chunks > 1 else 1
    enough = 2 * ranks + 2 * group
    long = 2 * ranks * chunks * count > MOST_ACTIONS and count > enough + group
    if not long or request.sizes is not None or request.plan is not None:
        plan = build_plan(request, ranks, chunks, count)
        whole = simulate(plan, costs)
        return StepPlan(plan, whole.makespan, whole.bubble, _actions(plan))
    short = enough + (count - enough) % group
    plans = [build_plan(request, ranks, chunks, n) for n in (short, short + group)]
    first, second = (simulate(plan, costs) for plan in plans)
    steps = (count - short) / group
    seconds = first.makespan + steps * (second.makespan - first.makespan)
    useful = first.useful + steps * (second.useful - first.useful)
    ends = zip(*map(_actions, plans), strict=True)
    actions = tuple(
        {k: a.get(k, 0) + steps * (n - a.get(k, 0)) for k, n in b.items()} for a, b in ends
    )
    return StepPlan(plans[1], seconds, 1 - useful / seconds if seconds else 0.0, actions)


def _actions(plan: Plan) -> tuple[Actions, ...]:
    return tuple(
        Counter((action.op, action.stage) for action in row if action.microbatch is not None)
        for row in plan.rows
    )
