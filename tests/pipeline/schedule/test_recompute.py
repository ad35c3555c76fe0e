"""What is recomputed, when, and what it costs; a micro-batch takes 1 + 1 + 1 of a rank's time."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule import orders
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.recompute import choose, in_advance, in_bubble, place
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate

EQUAL = Costs()
SIZES = ((4, 8), (4, 16), (4, 64), (8, 8), (8, 16), (8, 64), (16, 16), (16, 64))


def figures(*values):
    """Cases: a value for each of the sizes."""
    return pytest.mark.parametrize(("sizes", "bubble"), list(zip(SIZES, values, strict=True)))


def interleaved(p: int, v: int, m: int) -> Plan:
    return Plan(Placement.loop(p, v), orders.flush(p, v, m), m)


def bubble_and_memory(plan: Plan) -> tuple[float, float]:
    found = simulate(plan)
    return round(100 * found.bubble, 1), max(found.peak_memory)


def recomputed(plan: Plan) -> list[int]:
    return [sum(action.op == "R" for action in row) for row in plan.rows]


def chunks_of(row) -> list[tuple[int, int]]:
    return [(action.stage, action.microbatch) for action in row if action.op == "F"]


@figures(15.8, 9.4, 8.1, 30.4, 17.9, 9.6, 31.9, 13.1)
def test_in_bubble_stores_p_micro_batches(sizes, bubble):
    p, m = sizes
    assert bubble_and_memory(in_bubble(interleaved(p, 2, m), EQUAL)) == (bubble, p)


@figures(31.4, 28.4, 25.9, 41.5, 34.2, 27.5, 43.5, 30.7)
def test_in_advance_stores_two_chunks(sizes, bubble):
    p, m = sizes
    assert bubble_and_memory(in_advance(interleaved(p, 2, m), EQUAL)) == (bubble, 1.0)


def bound_to_backward(p: int, v: int, m: int) -> float:
    """Makespan of full recomputation: a backward recomputes when its gradient is there."""
    return simulate(interleaved(p, v, m), Costs(input_gradient=2)).makespan


@figures(36.8, 31.4, 26.7, 47.8, 38.5, 28.9, 48.9, 32.9)
def test_full_recomputation_bound_to_the_backward(sizes, bubble):
    p, m = sizes
    assert round(100 * (1 - 3 * m / bound_to_backward(p, 2, m)), 1) == bubble


def test_in_advance_hides_recomputation_while_the_gradient_travels():
    plan = interleaved(8, 2, 16)
    everything = [set(chunks_of(row)) for row in plan.rows]
    assert bound_to_backward(8, 2, 16) == 78.0
    assert simulate(place(plan, everything, 1.0, EQUAL)).makespan == 74.5  # - 4.5 %
    assert simulate(in_advance(plan, EQUAL)).makespan == 73.0  # - 6.4 %: the last stage is stored
    longer = simulate(in_advance(interleaved(8, 2, 64), EQUAL)).makespan
    assert (longer, bound_to_backward(8, 2, 64)) == (265.0, 270.0)  # - 1.9 %


def test_recomputation_moves_forward_by_at_most_one_chunk():
    plan = in_advance(interleaved(4, 2, 16), Costs(latency=0.1))
    for row in plan.rows:
        ready = 0
        for action in row:
            ready += (action.op == "R") - (action.op == "B" and action.stage != 7)
            assert 0 <= ready <= 2
    assert simulate(plan).makespan < bound_to_backward(4, 2, 16)


@pytest.mark.parametrize(
    ("sizes", "stored", "at_most"),
    [((4, 2, 32), 11, 8), ((8, 2, 64), 23, 16), ((8, 4, 64), 39, 32)],
)
def test_stored_chunks_of_the_first_rank(sizes, stored, at_most):
    plan = interleaved(*sizes)
    assert simulate(plan).peak_chunks[0] == stored
    assert simulate(in_bubble(plan, EQUAL)).peak_chunks[0] == at_most


def original_choice(row, p: int, v: int, m: int, rank: int) -> set[tuple[int, int]]:
    """What the original library recomputes.

    The excess over p v chunks that rank has after its warm-up, in full; then in every further
    group of micro-batches that excess from chunk 0, however early it returns; one in the last.
    """
    forwards, groups = chunks_of(row), m // p
    excess = max(0, 2 * (p - 1 - rank) + (v - 1) * p + 1 - p * v)
    if groups < 2 or excess == 0:
        return set()
    dropped = set(forwards[p * v : p * v + excess])
    if groups == 3:
        steady, tail = (1, 0) if 4 * rank + 3 >= p else (0, 2 + 2 * rank)
    else:
        steady, tail = max(0, groups - 3), int(groups > 3)
    for k in range(2 * p * v, len(forwards)):
        group, place_in_group = k // (p * v), k % (p * v)
        first = 1 + 2 * rank if group < 2 + steady else p - tail
        if first <= place_in_group < p:
            dropped.add(forwards[k])
    return dropped


@pytest.mark.parametrize(
    ("sizes", "base", "ours", "original", "counts"),
    [
        ((8, 2, 64), 202.5, 212.5, 219.5, (28, 43)),  # + 4.9 %, + 8.4 %
        ((4, 2, 32), 100.5, 105.5, 107.5, (15, 19)),  # + 5.0 %, + 7.0 %
        ((8, 2, 16), 58.5, 58.5, 58.5, (7, 7)),  # m = 2 p: free
        ((4, 2, 8), 28.5, 28.5, 28.5, (3, 3)),
    ],
)
def test_fewer_recomputations_than_the_original_at_the_same_cap(
    sizes, base, ours, original, counts
):
    p, v, m = sizes
    plan = interleaved(*sizes)
    theirs = [original_choice(row, p, v, m, rank) for rank, row in enumerate(plan.rows)]
    plans = in_bubble(plan, EQUAL), place(plan, theirs, p, EQUAL)
    assert tuple(simulate(x).makespan for x in (plan, *plans)) == (base, ours, original)
    assert tuple(recomputed(x)[0] for x in plans) == counts
    assert all(max(simulate(x).peak_chunks) <= p * v for x in plans)


def most_stored(row, dropped) -> int:
    stored = most = 0
    for action in row:
        gone = (action.stage, action.microbatch) in dropped
        stored += action.op == ("B" if gone else "F")
        most = max(most, stored)
        stored -= action.op == "B"
    return most


@pytest.mark.parametrize("sizes", [(2, 2, 4), (3, 2, 3), (4, 1, 6), (2, 2, 6)])
@pytest.mark.parametrize("less", [1, 2, 3])
def test_no_choice_drops_fewer(sizes, less):
    plan = interleaved(*sizes)
    for row in plan.rows:
        cap = most_stored(row, ()) - less
        if cap < 2:
            continue
        dropped = choose(row, cap, plan.placement.num_stages - 1)
        assert most_stored(row, dropped) <= cap
        for fewer in combinations(chunks_of(row), len(dropped) - 1):
            assert most_stored(row, set(fewer)) > cap


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("v", [2, 4])
@pytest.mark.parametrize("make", [in_bubble, in_advance])
def test_every_dropped_chunk_is_recomputed_between_its_forward_and_backward(p, v, make):
    for m in (p, p + 1, 2 * p, 4 * p):
        base = interleaved(p, v, m)
        plan = make(base, Costs(latency=0.1))
        simulate(plan)
        for row, before in zip(plan.rows, base.rows, strict=True):
            fixed = [a._replace(op="F") if a.op == "Fc" else a for a in row if a.op != "R"]
            assert tuple(fixed) == before
            again = {(a.stage, a.microbatch): i for i, a in enumerate(row) if a.op == "R"}
            ops = {(a.op, a.stage, a.microbatch): i for i, a in enumerate(row)}
            assert again.keys() == {key for op, *key_ in ops if op == "Fc" for key in [(*key_,)]}
            for (stage, i), position in again.items():
                assert ops["Fc", stage, i] < position < ops["B", stage, i]
                assert stage != p * v - 1


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("latency", [0.0, 0.1, 0.5])
def test_no_rank_stores_more_than_the_cap(p, latency):
    costs = Costs(latency=latency)
    for v, m, cap in product((2, 3), (p, p + 1, 3 * p), (3, p, 2 * p - 1)):
        plan = interleaved(p, v, m)
        assert max(simulate(in_bubble(plan, costs, cap / v), costs).peak_chunks) <= cap
        assert max(simulate(in_advance(plan, costs), costs).peak_chunks) <= 2


def test_stages_of_different_sizes_store_p_micro_batches_and_empty_ones_stay():
    shares = (0.0, 0.5, 0.25, 0.25, 1.5, 0.25, 0.5, 0.75)
    costs, plan = Costs(stage_shares=shares), interleaved(4, 2, 16)
    found = in_bubble(plan, costs)
    assert max(simulate(plan, costs).peak_memory) > 4 >= max(simulate(found, costs).peak_memory)
    dropped = {action.stage for action in found.rows[0] if action.op == "Fc"}
    assert dropped == {4}  # stage 0 stores nothing


def test_split_backwards_are_stored_until_their_weight_gradient():
    p, v, m = 4, 2, 16
    base = interleaved(p, v, m)
    halves = {"B": "IW"}
    rows = tuple(
        tuple(action._replace(op=op) for action in row for op in halves.get(action.op, action.op))
        for row in base.rows
    )
    plan = in_bubble(Plan(base.placement, rows, m), EQUAL)
    found = simulate(plan)
    assert max(found.peak_chunks) == p * v
    assert found.counts["I"] == found.counts["W"] == p * v * m
    assert sum(recomputed(plan)) == found.counts["Fc"] > 0


def test_too_few_chunks_are_refused():
    with pytest.raises(ConfigError, match="0 micro-batches are too few: at "):
        in_bubble(interleaved(2, 2, 4), EQUAL, cap=0)
    strict = interleaved(2, 2, 4)
    rows = tuple(
        tuple(sorted(row, key=lambda a: (a.op != "F", a.stage if a.op == "F" else -a.stage)))
        for row in strict.rows
    )
    with pytest.raises(
        ConfigError, match=r"1 micro-batches are too few: at 3F2 this schedule stores 1\.5 "
    ):
        in_bubble(Plan(strict.placement, rows, 4), EQUAL, cap=1)


def test_micro_batches_of_different_sizes_are_dropped_by_their_size():
    sizes = (1.0, 2.0, 4.0, 4.0, 4.0, 4.0, 2.0, 1.0)
    base = interleaved(2, 2, 8)
    plan = Plan(base.placement, base.rows, 8, sizes)
    assert max(simulate(plan).peak_memory) == 10.0
    assert max(simulate(in_bubble(plan, EQUAL)).peak_memory) <= 2 * 4
    assert max(simulate(in_bubble(plan, EQUAL, cap=6)).peak_memory) <= 6


def test_a_schedule_that_waits_for_itself_is_refused():
    plan = interleaved(2, 2, 4)
    rows = (plan.rows[0], plan.rows[1][::-1])
    with pytest.raises(ConfigError, match="waits for itself"):
        place(Plan(plan.placement, rows, 4), [(), ()], 4, EQUAL)


def test_a_request_for_recomputation():
    def plan(**asked) -> Plan:
        return build_plan(ScheduleRequest("interleaved", **asked), 4, 2, 16)

    bubble, advance = plan(recompute="bubble"), plan(recompute="advance")
    assert [max(simulate(one).peak_chunks) for one in (plan(), bubble, advance)] == [11, 8, 2]
    assert max(simulate(plan(recompute="bubble", memory_limit=3.5)).peak_chunks) == 7
    for one in (bubble, advance):
        assert [sum(action.op == "G" for action in row) for row in one.rows] == [2] * 4
    forwards = build_plan(ScheduleRequest("interleaved", recompute="bubble"), 4, 2, 16, True)
    assert {action.op for _, action in forwards} == {"F"}
