"""Waves: bubble, memory and messages of the published figures and below."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate

WHOLE = {  # (p, m): most bubble of 2, 4, 8 chunks, in F with B = 2 F
    (4, 4): (6, 3.25, 1.625),
    (4, 8): (6, 6, 5.5),
    (8, 8): (14, 7.5),
    (8, 16): (14, 14.5),
}


def step(kind, p, v, m, **changes):
    request = ScheduleRequest(kind=kind, **changes)
    return simulate(build_plan(request, p, v, m), request.costs)


@pytest.mark.parametrize(("p", "m"), WHOLE)
def test_whole_backwards_have_the_bubble_of_the_figures_or_less(p, m):
    for v, bubble in zip((2, 4, 8), WHOLE[p, m], strict=False):
        found = step("wave", p, v, m)
        assert found.counts["I"] == 0
        assert found.makespan - 3 * m <= bubble + 1e-9
        assert max(found.peak_memory) <= p


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 4), (4, 4, 16), (4, 8, 8), (8, 4, 8), (8, 2, 32)])
def test_divided_backwards_have_a_bubble_of_one_forward_less_at_any_m(p, v, m):
    found = step("zb-wave", p, v, m)
    assert found.makespan - 3 * m == pytest.approx((p - 1) / v)
    assert max(found.peak_memory) <= p


@pytest.mark.parametrize(("p", "v", "m"), [(4, 4, 8), (3, 6, 5), (5, 3, 7)])
def test_turns_cost_no_message(p, v, m):
    for kind in ("wave", "zb-wave"):
        messages = sum(step(kind, p, v, m).messages.values())
        assert messages == 2 * m * (v * p - 1 - (v - 1))


def test_latency_costs_less_than_in_a_loop():
    costs = Costs(latency=0.1)
    wave, loop = (step(kind, 4, 4, 8, costs=costs) for kind in ("zb-wave", "zb-h1"))
    assert wave.makespan < loop.makespan


def test_less_memory_than_a_block_needs_is_refused_with_its_least():
    with pytest.raises(ConfigError, match=r"zb-wave needs .* A of activations; 0.5 A are allowed"):
        step("zb-wave", 4, 4, 8, memory_limit=0.5)


def test_one_chunk_has_no_waves():
    with pytest.raises(ConfigError, match="wave needs several model chunks"):
        step("wave", 4, 1, 8)
