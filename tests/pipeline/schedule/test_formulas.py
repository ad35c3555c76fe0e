"""The closed formulas for bubble, memory and exposed reduction equal the simulator."""

import math
import random

import pytest

from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate

SOME, OTHERS = (2, 3, 4, 8), (5, 6, 7, 16)
TIMES = [(1, 1, 1), (1, 1.5, 0.75), (1, 0.75, 1.25), (2, 1, 1)]


def microbatches(p):
    """p to 4p; all of them for few ranks."""
    return range(p, 4 * p + 1) if p <= 3 else sorted({p, p + 1, 2 * p - 1, 2 * p, 3 * p, 4 * p})


def priced(kind, p, v, m, costs, **changes):
    return simulate(build_plan(ScheduleRequest(kind=kind, costs=costs, **changes), p, v, m), costs)


def widest_group(p, m):
    return p if m % p == 0 else math.ceil(m / (m // p))


@pytest.mark.weekly_cases("2-*", "[14]-ranks[567]-*", "4-ranks4-*")
@pytest.mark.parametrize(
    ("ranks", "times"),
    [(SOME, TIMES[0]), *((SOME[:3], times) for times in TIMES[1:])]
    + [pytest.param(OTHERS, times, marks=pytest.mark.slow) for times in TIMES],
)
@pytest.mark.parametrize("v", [1, 2, 4])
def test_loops(v, ranks, times):
    f, i, w = times
    costs = Costs(f, i, w)
    for p in ranks:
        for m in microbatches(p):
            g = widest_group(p, m) if v > 1 else p
            whole = priced("1f1b", p, v, m, costs)
            assert whole.bubble_time == pytest.approx((p - 1) * (f + i + w) / v)
            k = 2 if v > 1 else 1
            assert max(whole.peak_chunks) == min(k * (p - 1) + (v - 1) * g + 1, v * m)
            split = priced("zb-h1", p, v, m, costs)
            assert split.bubble_time == pytest.approx((p - 1) * max(f, i, f + i - w) / v)
            assert set(split.peak_chunks) <= {min(p - 1 + (v - 1) * g + 1, v * m)}
            if v > 1:
                nano = priced("nanopipe", p, v, m, costs)
                if i <= w:
                    assert nano.bubble_time == pytest.approx((p - 1) * f / v)
                assert nano.bubble_time <= split.bubble_time + 1e-9
                assert max(nano.peak_chunks) <= max(whole.peak_chunks)
                out = priced("aiao", p, v, m, costs)
                assert out.bubble_time == pytest.approx(whole.bubble_time)
                assert max(out.peak_chunks) == min(2 * (p - 1) + (v - 1) * m + 1, v * m)


@pytest.mark.slow
@pytest.mark.parametrize("draws", [25, pytest.param(120, marks=pytest.mark.weekly)])
def test_conditions_of_the_formulas_of_the_documentation(draws):
    """docs/pipeline.md: what holds for all times, and what only where they are nearly equal."""
    draw = random.Random(7)
    for case in range(draws):
        p = draw.choice((2, 3, 4, 6))
        m = p * draw.choice((2, 3))
        f, i, w = (draw.uniform(0.4, 2.2) for _ in range(3))
        for v in (1, 2, 4):
            split = priced("zb-h1", p, v, m, Costs(f, i, w)).bubble_time
            assert split == pytest.approx((p - 1) * max(f, i, f + i - w) / v)
            nano = priced("nanopipe", p, v, m, Costs(f, i, w)).bubble_time
            assert nano <= split + 1e-9 and nano >= (p - 1) * f / v - 1e-9
        near = [draw.uniform(0.955, 1.045) for _ in range(3)] if case else [1, 1, 1]
        f, i, w = near
        found = {
            kind: priced(kind, p, 2, m, Costs(f, i, w)).bubble_time
            for kind in ("nanopipe", "zb-v", "dualpipev")
        }
        assert found["nanopipe"] == pytest.approx((p - 1) / 2 * f)
        assert found["dualpipev"] == pytest.approx((p - 1) / 2 * max(f, f + i - w))
        least = (p - 1) / 2 * max(f, i)
        assert least - 1e-9 <= found["zb-v"] <= least * (1.05 if case else 1) + 1e-9


def test_the_v_shape():
    """With tI <= 2 tW the bubble of ZB-V is (p - 1) / 2 max(tF, tI).

    The order of the forwards and backwards decides: 30,000 random places of the weight gradients on
    two ranks were not faster.
    """
    for f, i, w in [*TIMES, (1, 1, 0.5), (1, 2, 1)]:
        costs = Costs(f, i, w)
        for p in (2, 3, 4, 8):
            for m in (2 * p - 1, 2 * p, 3 * p):
                found = priced("zb-v", p, 2, m, costs)
                assert found.bubble_time == pytest.approx((p - 1) / 2 * max(f, i))
                assert max(found.peak_memory) == p
    for w in (0.25, 0.5, 1):
        for p in (2, 3, 4, 8):
            found = priced("dualpipev", p, 2, 2 * p, Costs(1, 1, w), split_cooldown=True)
            assert found.bubble_time == pytest.approx((p - 1) / 2 * (2 - w))
            assert max(found.peak_memory) == p + 0.5


@pytest.mark.parametrize("v", [1, 2, 4, 8])
def test_exposed_reduction(v):
    for p, m in ((2, 4), (4, 4), (4, 16), (8, 16)):
        for reduction in (1, 10, 40, 150):
            costs = Costs(reduction=reduction)
            for kind, g in (("1f1b", p), ("aiao", m)):
                if v == 1 and kind == "aiao":
                    continue
                exposed = max(reduction / v, reduction - (v - 1) * g * 2 / v)
                assert priced(kind, p, v, m, costs).exposed_reduction == pytest.approx(exposed)


@pytest.mark.parametrize(
    ("p", "m", "v", "exposed", "gain"),
    [
        (8, 64, 4, (138.9, 54.9), 33),
        (8, 64, 8, (136.9, 38.9), 42),
        (4, 16, 4, (31.7, 13.7), 28),
        (4, 16, 8, (30.7, 9.7), 36),
    ],
)
def test_all_in_all_out_hides_the_reduction(p, m, v, exposed, gain):
    """Reduction: 44 % of it and the computation together."""
    costs = Costs(reduction=3 * m * 0.44 / 0.56)
    found = [priced(kind, p, v, m, costs) for kind in ("interleaved", "aiao")]
    assert tuple(round(one.exposed_reduction, 1) for one in found) == exposed
    before, after = (one.makespan + one.exposed_reduction for one in found)
    assert round(100 * (before / after - 1)) == gain


def test_without_reductions_in_the_plan_nothing_is_hidden():
    plan = build_plan(ScheduleRequest(), 4, 2, 8)
    rows = tuple(tuple(action for action in row if action.op != "G") for row in plan.rows)
    bare = type(plan)(plan.placement, rows, 8)
    assert simulate(bare, Costs(reduction=10)).exposed_reduction == 10


def test_the_span_leaves_out_the_stagger_of_the_starts():
    """ZB-H2: no bubble within the span of a rank, the bound within the synchronous step."""
    found = priced("zb-h1", 8, 1, 64, Costs(), warmup=2.0)
    span = max(row[-1].end - row[0].start for row in found.timeline)
    assert span == found.useful
    assert found.bubble_time == 7
    assert found.idle == (7,) * 8
