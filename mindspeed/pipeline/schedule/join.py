"""Backwards that need not be divided are made whole again.

A whole backward is faster than its parts: the reduction of dx over tensor-parallel ranks hides
behind the product of dW, and nothing is kept in between. So an I that is followed by its own W
becomes a B again, unless the rank that waits for the gradient would be late, or nearly so:

    rank 0 of a loop   I0 W0 F4 I1 W1     nobody waits for the gradients of stage 0
                       B0    F4 B1
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed.pipeline.schedule.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.simulate import simulate

_ROUNDING = 1e-9


def joined(plan: Plan, costs: Costs) -> Plan:
    """``plan`` with whole backwards where that delays no action of any rank.

    The message of a whole backward leaves later by the time of its W. It must still arrive one more
    such time before it is needed: real ranks are not as punctual as simulated ones.
    """
    timeline = simulate(plan, costs).timeline
    starts = {action: start for row in timeline for action, start, _ in row}
    rows = []
    for row in plan.rows:
        kept: list[Action] = []
        for action in row:
            before = kept[-1] if kept else None
            if (
                before is not None
                and (before.op, action.op) == (BACKWARD_INPUT, BACKWARD_WEIGHT)
                and before[1:] == action[1:]
                and _in_time(plan, costs, starts, before, action)
            ):
                kept[-1] = Action(BACKWARD, action.stage, action.microbatch)
            else:
                kept.append(action)
        rows.append(tuple(kept))
    return replace(plan, rows=tuple(rows))


def _in_time(
    plan: Plan, costs: Costs, starts: dict[Action, float], part: Action, rest: Action
) -> bool:
    """Whether the gradient that ``part`` sends may leave after ``rest``."""
    transfer = plan.transfer_of(part)
    if transfer is None:  # nobody waits, or an action of the same rank, which comes later anyway
        return True
    seconds = costs.seconds(plan, rest)
    arrives = starts[rest] + seconds + costs.latency
    needed = next(
        starts[action]
        for op in (BACKWARD_INPUT, BACKWARD)
        if (action := Action(op, transfer.stage, transfer.microbatch)) in starts
    )
    return needed >= arrives + seconds - _ROUNDING
