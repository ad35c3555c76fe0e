"""Backwards that are whole again: fewer parts, the same time line."""

from __future__ import annotations

import pytest

from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.join import joined
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate
from tests.pipeline.schedule.test_checker import plan_of

SLOW_LINKS = Costs(latency=0.1)


@pytest.mark.parametrize(
    ("kind", "p", "v", "m", "costs", "split"),
    [
        # Of rank 0 nobody waits for gradients of stage 0.
        ("zb-h1", 8, 1, 64, Costs(), 512 - 64),
        ("zb-h1", 8, 2, 64, SLOW_LINKS, 1024 - 128),
        ("nanopipe", 8, 2, 64, Costs(), 1024 - 155),
        ("zb-v", 8, 2, 64, Costs(), 1024 - 504),
        ("zb-v", 8, 2, 64, SLOW_LINKS, 1024 - 511),
    ],
)
def test_backwards_that_stay_divided(kind, p, v, m, costs, split):
    plan = build_plan(ScheduleRequest(kind=kind, costs=costs), p, v, m)
    counts = simulate(plan, costs).counts
    assert counts["I"] == counts["W"] == split
    assert counts["B"] + counts["I"] == p * v * m


def test_no_action_of_any_rank_starts_later():
    divided = plan_of(
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2 0G", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2 1G", m=3
    )
    whole = joined(divided, Costs())
    assert str(whole.rows[0][2]) == "0B0" and whole.rows[1] == divided.rows[1]
    before, after = (simulate(plan, Costs()) for plan in (divided, whole))
    assert before.timeline[1] == after.timeline[1]
    starts = {action: start for action, start, _ in before.timeline[0]}
    for action, start, _ in after.timeline[0]:
        if action.op == "B":
            action = action._replace(op="I")
        assert start == starts[action]
    assert after.peak_memory == before.peak_memory


def test_a_gradient_that_is_waited_for_leaves_at_once():
    # Rank 0 waits for the gradient of 1I0; that of 1I1 is there long before it is needed.
    late = plan_of("0F0 0F1 0B0 0B1 0G", "1F0 1I0 1W0 1F1 1I1 1W1 1G", m=2)
    assert joined(late, Costs()) == late
    assert simulate(joined(late, Costs())).makespan == simulate(late).makespan
    early = plan_of("0F0 0F1 0F2 0F3 0F4 0F5 0F6 0B0 0B1 0B2 0B3 0B4 0B5 0B6 0G",
                    " ".join(f"1F{i} 1I{i} 1W{i}" for i in range(7)) + " 1G", m=7)  # fmt: skip
    assert "1B1" in map(str, joined(early, Costs()).rows[1])
    assert simulate(joined(early, Costs())).makespan == simulate(early).makespan
