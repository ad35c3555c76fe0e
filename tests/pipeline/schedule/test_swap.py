"""Pending weight gradients on the host: the device keeps what interleaved 1F1B keeps."""

import pytest

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.checker import check
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate


def nanopipe(p, v, m, **changes):
    return build_plan(ScheduleRequest(kind="nanopipe", **changes), p, v, m)


def moved(plan):
    return [sum(action.op == "O" for action in row) for row in plan.rows]


def test_four_ranks_keep_what_interleaved_1f1b_keeps():
    plain = simulate(nanopipe(4, 2, 16))
    plan = nanopipe(4, 2, 16, swap=True)
    swapped = simulate(plan)
    assert plain.peak_chunks == (11, 11, 11, 11)
    assert swapped.peak_chunks == (11, 9, 7, 5)
    assert simulate(build_plan(ScheduleRequest(), 4, 2, 16)).peak_chunks == (11, 9, 7, 5)
    assert moved(plan) == [0, 2, 4, 6]
    assert swapped.makespan == plain.makespan


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (3, 2, 8), (4, 1, 8), (4, 4, 16), (8, 2, 16)])
def test_rank_r_moves_what_its_warmup_is_shorter(p, v, m):
    plan = nanopipe(p, v, m, swap=True)
    order = simulate(build_plan(ScheduleRequest(), p, v, m))
    assert simulate(plan).peak_chunks == order.peak_chunks
    assert moved(plan) == [r * (2 if v > 1 else 1) for r in range(p)]
    assert check(plan).peak_memory == order.peak_memory


def test_many_microbatches_cost_one_slot():
    plain, swapped = (simulate(nanopipe(8, 2, 64, swap=swap)) for swap in (False, True))
    assert (plain.makespan, swapped.makespan) == (195.5, 196.5)
    assert swapped.peak_chunks == (23, 21, 19, 17, 15, 13, 11, 9)


def test_a_load_ends_before_its_weight_gradient():
    costs = Costs(transfer=1.0)
    simulation = simulate(nanopipe(4, 2, 16, swap=True, costs=costs), costs)
    assert simulation.makespan == 49.5
    for row, copies in zip(simulation.timeline, simulation.background, strict=True):
        starts = {(a.stage, a.microbatch): start for a, start, _ in row if a.op == "W"}
        loads = [one for one in copies if one.action.op == "L"]
        assert all(end <= starts[a.stage, a.microbatch] for a, _, end in loads)
    # Until a copy to the host has ended, its source is still there.
    assert simulation.peak_chunks == (11, 10, 8, 6)


def test_forwards_alone_above_the_limit_are_refused():
    message = "nanopipe needs 5.5 A of activations at the peak of rank 0; 4 A are allowed"
    for swapped in (True, False):
        with pytest.raises(ConfigError, match=message):
            nanopipe(4, 2, 16, swap=swapped, memory_limit=4.0)
