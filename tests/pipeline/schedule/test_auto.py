"""``auto``: the fastest plan within the memory limit."""

import pytest

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate


def auto(p, v, m, costs=None, **changes):
    costs = costs or Costs()
    request = ScheduleRequest(kind="auto", costs=costs, **changes)
    return simulate(build_plan(request, p, v, m), costs)


def step(simulation):
    return simulation.makespan + simulation.exposed_reduction


@pytest.mark.parametrize(
    "costs",
    [Costs(), Costs(latency=0.1), Costs(1, 1.5, 0.7, latency=0.3), Costs(latency=1, reduction=9)],
)
@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 4), (4, 1, 8), (4, 2, 8), (4, 4, 8)])
def test_no_named_schedule_is_faster(p, v, m, costs):
    found = auto(p, v, m, costs)
    for kind in ("1f1b", "zb-h1", "nanopipe", *(["aiao"] if v > 1 else [])):
        named = simulate(build_plan(ScheduleRequest(kind=kind, costs=costs), p, v, m), costs)
        assert step(found) <= step(named) + 1e-6
    if v == 2:
        found = auto(p, v, m, costs, v_shape=True)
        for kind in ("zb-v", "dualpipev"):
            named = simulate(build_plan(ScheduleRequest(kind=kind, costs=costs), p, v, m), costs)
            assert step(found) <= step(named) + 1e-6


def test_larger_groups_hide_latency():
    """With slow messages all micro-batches at once are faster than groups of p."""
    costs = Costs(latency=1)
    aiao = simulate(build_plan(ScheduleRequest(kind="aiao", costs=costs), 4, 4, 12), costs)
    small = simulate(build_plan(ScheduleRequest(kind="nanopipe", costs=costs), 4, 4, 12), costs)
    assert auto(4, 4, 12, costs).makespan <= aiao.makespan < 0.8 * small.makespan


@pytest.mark.slow
def test_among_equally_fast_ones_it_takes_that_of_least_memory():
    """Without latency the short warm-up reaches the bound of the long one."""
    found = auto(8, 2, 64)
    assert (found.bubble_time, max(found.peak_memory)) == (3.5, 8)


def test_among_equally_fast_and_small_ones_it_takes_that_of_fewest_split_backwards():
    """Where weight gradients cost nothing there is nothing to gain by a split."""
    found = auto(4, 1, 8, Costs(weight_gradient=0))
    assert found.counts["I"] == 0


@pytest.mark.slow
def test_memory_buys_time_where_messages_are_slow():
    costs = Costs(latency=0.3)
    bubbles = []
    for limit in (8, 9, 10, 11.5, 16):
        found = auto(8, 2, 32, costs, memory_limit=limit)
        assert max(found.peak_memory) <= limit
        bubbles.append(found.bubble)
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[-1] < 0.5 * bubbles[0]


def test_a_long_reduction_makes_the_groups_larger():
    costs = Costs(reduction=40)
    found, plain = auto(4, 4, 16, costs), build_plan(ScheduleRequest(), 4, 4, 16)
    assert found.exposed_reduction < simulate(plain, costs).exposed_reduction
    assert max(found.peak_memory) > 4.75


def test_it_may_be_told_not_to_split():
    assert auto(4, 2, 8, split=False).counts["I"] == 0
    assert auto(4, 2, 8, split=False, v_shape=True).counts["I"] == 0


def test_sizes_are_relative_to_their_mean():
    sizes = (1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5, 5, 4, 3, 2)
    found = auto(4, 1, 16, sizes=sizes)
    assert found.useful == pytest.approx(48)


def test_too_little_memory_names_the_least_that_would_do():
    with pytest.raises(ConfigError) as error:
        auto(8, 2, 64, memory_limit=7.5)
    assert str(error.value) == (
        "no pipeline schedule of 64 micro-batches on 8 ranks fits in 7.5 A of activations "
        "(--pipeline-memory-limit); the smallest one needs 8 A; one on a V-shape fits: "
        "--pipeline-schedule v-auto"
    )


def test_below_the_least_memory_of_all_blocks_it_names_the_block():
    with pytest.raises(ConfigError, match=r"in 0.9 A .* 1 A \(building block: steps 1 "):
        auto(4, 2, 8, memory_limit=0.9, v_shape=True)


@pytest.mark.slow
def test_no_group_size_is_faster():
    """19 and 13 micro-batches, where groups of p, 2 p, ... are all slower than those of p."""
    costs = Costs(reduction=20)
    found = step(auto(8, 2, 32, costs))
    for size in (16, 19, 20, 32):
        request = ScheduleRequest(kind="nanopipe", costs=costs, group_size=size)
        assert found <= step(simulate(build_plan(request, 8, 2, 32), costs)) + 1e-6
    assert found == pytest.approx(113)


def test_groups_of_any_size_are_tried():
    """9 and 7 micro-batches: between groups of 8 and of all 16."""
    costs = Costs(1, 1, 0.7, reduction=5)
    request = ScheduleRequest(kind="nanopipe", costs=costs, group_size=9)
    named = simulate(build_plan(request, 4, 3, 16), costs)
    assert step(auto(4, 3, 16, costs)) <= step(named) + 1e-6
