"""Pairs: a forward and a backward that run at the same time, in the table and on the clock."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.checker import check
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.csv_file import read_plan, write_plan
from mindspeed.pipeline.schedule.pairs import pair_seconds
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import PAIRED, ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate

LAYERS = 8  # of a rank
EXCHANGES = (0, 0.25, 0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5)


def build(kind, p, m, x=0.0, pairs=True, **changes):
    costs = Costs(exchange=x, layers=LAYERS)
    request = ScheduleRequest(kind=kind, costs=costs, pairs=pairs, **changes)
    return build_plan(request, p, 1 if kind == "1f1b" else 2, m)


def step(kind, p, m, x, pairs=True, **changes):
    plan = build(kind, p, m, x, pairs, **changes)
    return simulate(plan, Costs(exchange=x, layers=LAYERS)).makespan


@pytest.mark.parametrize("x", EXCHANGES)
def test_a_layer_of_a_pair_exposes_what_computation_cannot_hide(x):
    def exposed(weight):
        few, many = (pair_seconds(n, n, n * weight, n * x, n) for n in (20, 40))
        return (many - few) / 20 - 2 - weight

    assert exposed(1) == pytest.approx(max(0, 4 * x - 3))
    assert exposed(0) == pytest.approx(max(0, 4 * x - 2))


@pytest.mark.parametrize("x", EXCHANGES)
def test_rows_that_come_again_are_a_fifth_collective(x):
    few, many = (pair_seconds(n, n, n, n * x, n, rows_again=True) for n in (20, 40))
    assert (many - few) / 20 - 3 == pytest.approx(max(0, 3 * x - 1.5, 5 * x - 3))


@pytest.mark.parametrize("kind", ["interleaved", "dualpipev", "zb-v", "nanopipe"])
def test_rows_come_again_for_nothing_up_to_half_a_forward(kind):
    """A further micro-batch costs its work alone, as without the fifth collective."""
    for x, most in ((0.25, 3), (0.5, 3), (1, 5)):
        costs = Costs(exchange=x, layers=LAYERS, rows_again=True)
        times = []
        for m in (16, 32):
            plan = build_plan(ScheduleRequest(kind=kind, costs=costs, pairs=True), 4, 2, m)
            times.append(simulate(plan, costs).makespan)
        assert 3 - 1e-9 <= (times[1] - times[0]) / 16 <= most + 1e-9, x


PRICES = {  # (p, m, x) -> 1F1B, interleaved, DualPipeV: one after the other, together
    (4, 16, 0.5): ((95, 65), (87.5, 60.5), (84.5, 60.5)),
    (4, 16, 0.75): ((114, 70.875), (105, 66), (102, 68.0625)),
    (4, 16, 1): ((133, 88), (122.5, 82), (119.5, 83.5)),
    (8, 16, 0.5): ((115, 85), (97.5, 74.5), (90.5, 74.5)),
    (8, 32, 0.5): ((195, 133), (177.5, 122.5), (170.5, 122.5)),
    (8, 32, 0.75): ((234, 145.25), (213, 133.75), (206, 138.5625)),
}


@pytest.mark.parametrize(("p", "m", "x"), PRICES)
def test_prices_of_schedules(p, m, x):
    kinds = ("1f1b", "interleaved", "dualpipev")
    for kind, (alone, together) in zip(kinds, PRICES[p, m, x], strict=True):
        k = {"warmup": 2.0} if kind == "1f1b" else {}
        assert step(kind, p, m, x, pairs=False, **k) == pytest.approx(alone), kind
        assert step(kind, p, m, x) == pytest.approx(together), kind


@pytest.mark.parametrize("kind", PAIRED)
def test_half_a_forward_is_hidden_in_steady_state(kind):
    """Three units of work for every further micro-batch, and not seven or five."""
    for x, most in ((0.25, 3), (0.5, 3), (0.75, 3.07), (1, 4)):
        slope = (step(kind, 4, 32, x) - step(kind, 4, 16, x)) / 16
        assert 3 - 1e-9 <= slope <= most + 1e-9, x


def test_zero_bubble_schedules_split_the_backwards_that_have_no_partner():
    for kind in ("zb-v", "nanopipe"):
        plan = build(kind, 4, 16, 0.5)
        ops = {action.op for _, action in plan}
        assert ops == {"F", "B", "I", "W", "G"} and plan.paired
        assert step(kind, 4, 16, 0.5) <= step("dualpipev", 4, 16, 0.5)


def test_memory_of_pairs():
    peaks = {kind: max(simulate(build(kind, 8, 32)).peak_memory) for kind in PAIRED}
    expected = {"1f1b": 16, "interleaved": 12, "dualpipev": 8.5, "zb-v": 8.5, "nanopipe": 12}
    assert peaks == expected
    with pytest.raises(ConfigError, match=r"8\.5 A .* 8 A are allowed"):
        build("zb-v", 8, 32, memory_limit=8)


def test_1f1b_starts_with_enough_forwards():
    """k = 1 would let the last rank's pair be of one micro-batch, or take twice the time."""
    plan = build("1f1b", 4, 8)
    for rank, row in enumerate(plan.rows):
        warmup = next(n for n, action in enumerate(row) if action in plan.paired)
        assert warmup == 2 * (3 - rank) + 1
    short = Plan(
        Placement.loop(2),
        (actions("0F0 0F1 0B0 0F2 0B1 0B2 0G"), actions("1F0 1F1 1B0 1F2 1B1 1B2 1G")),
        3,
        paired=frozenset(actions("0F1 0F2 1F1 1F2")),
    )
    with pytest.raises(ConfigError, match="rank 0 at 0F1&0B0 waits for 1B0 of rank 1"):
        check(short)


def actions(text):
    return tuple(map(Action.parse, text.split()))


@pytest.mark.parametrize(
    ("rows", "pair", "text"),
    [
        ("0F0 0B0 0F1 0B1", "0F0", "0F0: the members depend on each other"),
        ("0F0 0F1 0B0 0B1", "0F0", "0F0: a pair is a forward F and a backward B or I"),
        ("0F0 0F1 0B0 0B1", "0B0", "0B0: a pair is a forward"),
    ],
)
def test_what_is_no_pair_is_refused(rows, pair, text):
    plan = Plan(Placement.loop(1), (actions(rows),), 2, paired=frozenset([Action.parse(pair)]))
    with pytest.raises(ConfigError, match=f"rank 0, action ., {text}"):
        check(plan)


def test_pairs_in_files(tmp_path):
    path = tmp_path / "plan.csv"
    path.write_text("0F0,0F1&0B0,0B1\n")
    plan = read_plan(path)
    assert plan.paired == frozenset(actions("0F1")) and plan.rows[0][:3] == actions("0F0 0F1 0B0")
    path.write_text("0F0,(0B0;0F1)OVERLAP_F_B,0B1\n")
    assert read_plan(path) == plan
    whole = build("dualpipev", 4, 8)
    write_plan(path, whole)
    again = read_plan(path)
    assert (again.rows, again.paired) == (whole.rows, whole.paired)
    assert "(0F7;7B3)OVERLAP_F_B" in path.read_text()
    path.write_text("0F0,0F1&0B1,0B0\n")
    with pytest.raises(ConfigError, match="line 1, column 2: '0F1&0B1': the members depend"):
        read_plan(path)
    path.write_text("0F0,0F1&0W0,0B0\n")
    with pytest.raises(ConfigError, match="'0F1&0W0': a pair is a forward"):
        read_plan(path)


@pytest.mark.parametrize("kind", ["v-half", "v-min", "zb-h1", "aiao", "auto"])
def test_schedules_without_pairs_say_so(kind):
    with pytest.raises(ConfigError, match=r"has no pairs.*1f1b, interleaved, nanopipe"):
        build(kind, 4, 16)


def test_without_collectives_pairs_cost_something():
    assert step("dualpipev", 4, 16, 0) - step("dualpipev", 4, 16, 0, pairs=False) == 1.5
    assert step("dualpipev", 8, 32, 0) - step("dualpipev", 8, 32, 0, pairs=False) == 3.5


@pytest.mark.parametrize("kind", ["interleaved", "nanopipe"])
@pytest.mark.parametrize("m", [4, 8])
def test_a_rank_whose_forwards_all_come_first_has_no_pairs(kind, m):
    """With few micro-batches; its last forward would wait for its first backward for ever."""
    plan = build(kind, 4, m)
    pairs = [sum(one in plan.paired for one in row) for row in plan.rows]
    assert pairs == [max(0, 2 * m - (2 * (3 - rank) + 4 + 1)) for rank in range(4)]
