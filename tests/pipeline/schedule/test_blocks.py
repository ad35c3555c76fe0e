"""Schedules from building blocks: less memory than 1F1B without recomputation, and the front.

Figures of memory: Qi et al., "Pipeline parallelism with controllable memory" (2024), table 2.
"""

import pytest

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.blocks import V_ZERO_BUBBLE, Block, candidates, v_half, v_min
from mindspeed.pipeline.schedule.checker import check
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.fill import with_reductions
from mindspeed.pipeline.schedule.front import front, within
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate
from mindspeed.pipeline.schedule.weave import WeavingJob, woven

FEW, MANY = (3, 4, 8), (5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16)


def priced(kind, p, m, costs=Costs(), **changes):  # noqa: B008
    plan = build_plan(ScheduleRequest(kind=kind, costs=costs, **changes), p, 2, m)
    return simulate(plan, costs)


def bubble_of(kind, p):
    """For F = I = W = 1, of any number of micro-batches from p."""
    if kind == "v-half":
        return 1.5 * p - (2.0 if p % 2 else 3.5)
    return 7.0 if p == 5 else 2 * p - (2.5 if p % 3 else 3.5)


def test_slots_of_a_micro_batch():
    placement = Placement.v_shape(4)
    smallest, half = (Block(placement, walk(4)) for walk in (v_min, v_half))
    assert smallest.forward == tuple(range(8))
    assert smallest.backward == tuple(range(15, 7, -1))
    assert half.forward == (0, 2, 4, 6, 7, 8, 9, 10)
    assert half.backward == (25, 24, 23, 22, 20, 18, 16, 14)


@pytest.mark.parametrize("p", range(2, 17))
def test_no_two_actions_share_a_slot(p):
    placement = Placement.v_shape(p)
    assert not any(Block(placement, walk(p)).collides for walk in (v_min, v_half))
    assert not Block(placement, V_ZERO_BUBBLE).collides
    assert any(Block(placement, walk).collides for walk in candidates())


@pytest.mark.parametrize("p", [*FEW, *(pytest.param(p, marks=pytest.mark.slow) for p in MANY)])
def test_memory_and_bubble_are_the_published_ones(p):
    memory = {"v-min": (p + 4) // 3, "v-half": (p + 2) // 2}
    for kind, most in memory.items():
        for m in (p, 2 * p) if p <= 8 else (2 * p,):
            found = priced(kind, p, m)
            assert max(found.peak_memory) == most
            assert found.bubble_time == pytest.approx(bubble_of(kind, p))


LOST = {  # F, I, W, latency -> by v-min and v-half, of every further micro-batch on 8 ranks
    (1, 1, 1, 0): (0, 0),
    (1, 1.1, 0.9, 0): (0.3, 0),
    (1, 0.8, 1.2, 0): (0.325, 0),
    (1.3, 1, 1, 0): (0.647, 0),
    (1, 1.5, 0.5, 0): (1.5, 0),
    (1, 1, 1, 0.05): (0.256, 0),
    (1, 1, 1, 0.1): (0.512, 0),
}


@pytest.mark.parametrize("times", LOST)
def test_unequal_times_cost_v_min_something_in_every_micro_batch_and_v_half_nothing(times):
    forward, inputs, weights, latency = times
    costs = Costs(forward, inputs, weights, latency=latency)
    for kind, expected in zip(("v-min", "v-half"), LOST[times], strict=True):
        short, long = (priced(kind, 8, m, costs).bubble_time for m in (24, 40))
        assert (long - short) / 16 == pytest.approx(expected, abs=0.03 if expected else 1e-6), kind


@pytest.mark.parametrize("kind", ["v-half", "v-min"])
def test_an_order_can_use_more_memory_and_no_less_than_it_needs(kind):
    small, large = priced(kind, 8, 16), priced(kind, 8, 16, memory_limit=6)
    assert large.bubble_time < small.bubble_time and max(large.peak_memory) <= 6
    with pytest.raises(ConfigError, match=rf"{kind} needs \d A .* 2.5 A are allowed .* v-auto"):
        priced(kind, 8, 16, memory_limit=2.5)


def test_micro_batches_and_stages_may_differ():
    costs = Costs(1, 1.2, 0.9, latency=0.05, stage_shares=(0.7, *(0.5,) * 6, 0.3))
    found = priced("v-half", 4, 8, costs, sizes=(1, 2, 2, 2, 2, 2, 2, 1))
    most = max(found.peak_memory)
    check(found.plan, most, costs)
    others = priced("zb-v", 4, 8, costs, sizes=(1, 2, 2, 2, 2, 2, 2, 1))
    assert most < max(others.peak_memory)


def test_pending_weight_gradients_that_keep_more_than_a_forward_stay_within_the_limit():
    """As where layers are recomputed: W needs more than the inputs that F keeps."""
    costs = Costs(1, 2, 1, weight_share=3.0)
    plan = with_reductions(
        woven(Block(Placement.v_shape(4), v_half(4)), WeavingJob(8, costs), 4).plan
    )
    assert max(check(plan, None, costs).peak_memory) <= 4


def test_whole_backwards_can_be_woven():
    job = WeavingJob(8, Costs(1, 1, 1), whole=True)
    block = Block(Placement.v_shape(4), v_half(4))
    plan = with_reductions(woven(block, job, 4).plan)
    check(plan, 4)
    assert not simulate(plan).counts["I"]


@pytest.mark.parametrize("m", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_the_front_of_eight_ranks(m):
    found = {one.peak: one.simulation.bubble_time for one in front(8, WeavingJob(m, Costs()))}
    expected = {16: (43.5, 19, 18), 32: (75.5, 24, 23)}[m]
    expected = dict(
        zip((2, 3, 3.5, 4, 5, 6, 7, 8), (*expected, 11.5, 8.5, 5.5, 4.5, 3.5), strict=True)
    )
    assert {peak: found[peak] for peak in expected} == pytest.approx(expected)
    # The memory of V-Min with less bubble, and a part of 1F1B's memory with less bubble than it.
    assert found[4] < priced("v-min", 8, m).bubble_time
    if m == 16:
        assert found[3] < 3 * (8 - 1)
    bubbles = [found[peak] for peak in sorted(found)]
    assert bubbles == sorted(bubbles, reverse=True)


def test_the_front_of_four_ranks():
    found = {one.peak: one.simulation.bubble_time for one in front(4, WeavingJob(8, Costs()))}
    expected = {1: 26.5, 1.5: 19.5, 2: 5.5, 2.5: 5, 3: 2.5, 3.5: 2, 4: 1.5}
    assert found == pytest.approx(expected)


@pytest.mark.slow
def test_with_unequal_times_other_blocks_win():
    found = {one.peak: one for one in front(8, WeavingJob(16, Costs(1, 1.1, 0.9)))}
    assert found[4].simulation.bubble_time <= 15.05 + 1e-6
    assert found[4].origin != within(8, WeavingJob(16, Costs()), 4.0).origin


def test_a_long_step_takes_the_block_that_a_short_one_takes():
    short, long = (within(4, WeavingJob(m, Costs()), 3.0) for m in (12, 64))
    assert short.origin == long.origin
    assert short.simulation.bubble_time == long.simulation.bubble_time == 2.5
