"""The executor takes the time that the simulator says, and keeps as many activations.

No time is measured: messages carry the clocks of their senders.
"""

from __future__ import annotations

import pytest

from mindspeed.pipeline.placed_stages import V_SHAPES, WAVES
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.schedules import KINDS, PAIRED, ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate
from tests.pipeline.any_order import greedy
from tests.pipeline.schedule.toy_ranks import run_all

EVEN, SLOW = Costs(), Costs(1, 1.25, 0.75, latency=0.125)


def anywhere(ranks):
    """Three chunks: neighbours are two ranks apart, in the second one backwards."""
    row = [*range(1, ranks, 2), *range(0, ranks, 2)]
    chunks = (row, row[::-1], row)
    return Placement(
        tuple(
            tuple(number * ranks + chunk.index(rank) for number, chunk in enumerate(chunks))
            for rank in range(ranks)
        )
    )


def plans_of(ranks):
    m, found = 2 * ranks, []
    for kind in KINDS:
        for chunks in (1, 2):
            if chunks == 1 and kind in ("interleaved", "aiao", *V_SHAPES, *WAVES):
                continue
            for costs in (EVEN, SLOW):
                request = ScheduleRequest(kind=kind, costs=costs)
                found.append((build_plan(request, ranks, chunks, m), costs))
    sizes = (1.0, *[2.0] * (m - 2), 1.0)
    for changes in (
        {"kind": "interleaved", "recompute": "bubble"},
        {"kind": "interleaved", "recompute": "advance"},
        {"kind": "1f1b", "sizes": sizes},
        {"kind": "aiao", "strict": True},
        {"kind": "nanopipe", "swap": True, "costs": Costs(transfer=0.25)},
    ):
        request = ScheduleRequest(**changes)
        chunks = 1 if request.kind == "1f1b" else 2
        found.append((build_plan(request, ranks, chunks, m), request.costs))
    pairs = Costs(1, 1.25, 0.75, latency=0.125, exchange=0.5, layers=8)
    for kind in PAIRED:
        request = ScheduleRequest(kind=kind, costs=pairs, pairs=True)
        found.append((build_plan(request, ranks, 2 if kind != "1f1b" else 1, m), pairs))
    for kind in WAVES:
        found.append((build_plan(ScheduleRequest(kind=kind, costs=SLOW), ranks, 4, m), SLOW))
    found.append((greedy(anywhere(ranks), m), SLOW))
    found.append((build_plan(ScheduleRequest(), ranks, 1, m, forward_only=True), EVEN))
    return found


@pytest.mark.weekly_cases("8")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_executed_plans_take_the_simulated_time_and_memory(ranks, world_size):
    plans = plans_of(world_size)
    assert len(plans) > 20
    results = ranks(world_size, run_all, plans)
    for number, (plan, costs) in enumerate(plans):
        price = simulate(plan, costs)
        runs = [result[number] for result in results]
        assert [run.wrong for run in runs] == [[]] * world_size, plan.name
        assert tuple(run.trace for run in runs) == plan.rows, plan.name
        assert max(run.end for run in runs) == pytest.approx(price.makespan, rel=1e-12), plan.name
        if not any(action.op == "O" for _, action in plan):
            assert tuple(run.peak_chunks for run in runs) == price.peak_chunks, plan.name


def test_messages_are_let_go_when_a_later_one_shows_that_they_arrived(ranks):
    plan = build_plan(ScheduleRequest(), 4, 1, 64)
    found = [runs[0].most_sending for runs in ranks(4, run_all, [(plan, EVEN)])]
    assert found == [3, 4, 3, 2]  # of 64, 128, 128 and 64 messages
