"""A plan that is no training step is refused, and nothing else is."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.checker import check
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate


def plan_of(*rows: str, m=None, chunks=1, name="mine"):
    parsed = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    found = [a.microbatch for row in parsed for a in row if a.microbatch is not None]
    return Plan(Placement.loop(len(rows), chunks), parsed, m or max(found) + 1, name=name)


GOOD = plan_of("0F0 0F1 0B0 0B1 0G", "1F0 1B0 1F1 1B1 1G")


def changed(old, new, row=0):
    rows = [" ".join(map(str, one)) for one in GOOD.rows]
    assert old in rows[row]
    rows[row] = rows[row].replace(old, new)
    return plan_of(*rows, m=2)


REFUSED = {
    "a missing backward": (changed("0B1 ", ""), "rank 0, action 4, 0G: comes before the last"),
    "a missing weight gradient": (
        changed("1B1 1G", "1I1 1G", row=1),
        "rank 1, action 5, 1G: comes before the last gradient",
    ),
    "a missing forward": (changed("0F1 ", ""), "0B1: needs 0F1 before it"),
    "no reduction": (changed(" 0G", ""), "rank 0 has no 0G"),
    "two reductions": (changed("0G", "0G 0G"), "action 6, 0G: reduces a second time"),
    "two forwards": (changed("0F1", "0F1 0F1"), "action 3, 0F1: is there a second time"),
    "two backwards": (changed("0B1", "0B0 0B1"), "0B0: comes after the backward"),
    "another rank's stage": (changed("0F1", "1F1"), "1F1: stage 1 is on rank 1"),
    "a stage too far": (changed("0F1", "7F1"), "7F1: the stages are 0 to 1"),
    "a micro-batch too far": (changed("0F1", "0F2"), "0F2: the micro-batches are 0 to 1"),
    "a backward first": (changed("0F0 0F1 0B0", "0B0 0F0 0F1"), "0B0: needs 0F0 before it"),
    "micro-batches in another order": (
        changed("0F0 0F1", "0F1 0F0"),
        "action 1, 0F1: starts before 0F0",
    ),
    "a recomputation of what is stored": (changed("0B0", "0R0 0B0"), "0R0: is there a second"),
    "a backward without its recomputation": (changed("0F0", "0Fc0"), "0B0: needs 0R0 before it"),
    "a load of what is here": (changed("0B0", "0I0 0L0 0W0"), "0L0: "),
    "a weight gradient of what is away": (changed("0B0", "0I0 0O0 0W0"), "0W0: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_rule_names_rank_and_action(name):
    plan, message = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        check(plan)
    assert message in str(error.value)
    assert str(error.value).startswith("the pipeline schedule mine: rank ")


def test_a_deadlock_is_a_chain_of_actions():
    plan = plan_of("0F0 0B0 0F1 0B1 0G", "1F0 1F1 1B0 1B1 1G")
    with pytest.raises(ConfigError) as error:
        check(plan)
    assert str(error.value) == (
        "the pipeline schedule mine stops: rank 0 at 0B0 waits for 1B0 of rank 1, "
        "which at 1F1 waits for 0F1 of rank 0"
    )
    with pytest.raises(ConfigError, match="rank 0 at 0B0, rank 1 at 1F1"):
        simulate(plan)


def test_the_chain_leaves_out_ranks_that_only_wait_for_the_circle():
    rows = ("0F0 0F1 0B0 0B1 0G", "1F0 1B0 1F1 1B1 1G", "2F0 2F1 2B0 2B1 2G")
    with pytest.raises(ConfigError) as error:
        check(plan_of(*rows))
    assert "rank 0" not in str(error.value)
    assert "rank 1 at 1B0 waits for 2B0 of rank 2" in str(error.value)


def test_memory_above_the_limit_names_rank_action_and_both_numbers():
    plan = build_plan(ScheduleRequest(), 4, 2, 8)
    assert check(plan, memory_limit=5.5).peak_memory == (5.5, 4.5, 3.5, 2.5)
    with pytest.raises(ConfigError) as error:
        check(plan, memory_limit=5)
    assert str(error.value) == (
        "the pipeline schedule 1f1b: rank 0 keeps 5.5 A of activations at 0F6; 5 A are allowed "
        "(--pipeline-memory-limit)"
    )


def test_memory_follows_shares_sizes_and_what_a_weight_gradient_keeps():
    plan = plan_of("0F0 0F1 0I0 0I1 0W0 0W1 0G", "1F0 1B0 1F1 1B1 1G")
    assert check(plan, costs=Costs(weight_share=0.25)).peak_memory == (2, 1)
    sized = replace(plan, sizes=(0.5, 1.5))
    assert check(sized).peak_memory == (2, 1.5)
    assert check(plan, costs=Costs(stage_shares=(0.25, 2))).peak_memory == (0.5, 2)
    with pytest.raises(ConfigError, match="2 micro-batches, but 3 sizes"):
        check(replace(plan, sizes=(1, 1, 1)))


def test_one_stream_for_both_directions_stops_where_two_do_not():
    plan = build_plan(ScheduleRequest(), 4, 1, 8)
    assert check(plan).early_receives == (3, 3, 3, 2)
    with pytest.raises(ConfigError) as error:
        check(plan, one_stream_per_pair=True)
    assert "both directions share a stream, where rank " in str(error.value)
    interleaved = build_plan(ScheduleRequest(), 4, 2, 8)
    check(interleaved, one_stream_per_pair=True, prefetch=1)


def test_an_evaluation_has_forwards_only():
    for request in (ScheduleRequest(), ScheduleRequest(kind="zb-v")):
        plan = build_plan(request, 4, 2, 6, forward_only=True)
        assert {action.op for _, action in plan} == {"F"}
        with pytest.raises(ConfigError, match=r"has no 0B \(or I and W\) of micro-batch 0"):
            check(plan)
    with pytest.raises(ConfigError, match="nothing but a forward"):
        check(GOOD, forward_only=True)


# ------------------------------------------------------------------ against the rules as a graph


def is_a_step(plan):
    """The five rules once more, as sets and as a graph that is sorted."""
    place = {}
    for rank, row in enumerate(plan.rows):
        for number, action in enumerate(row):
            if action in place or action.stage not in plan.placement.stages[rank]:
                return False
            place[action] = rank, number
    ops = defaultdict(set)
    for action in place:
        ops[action.stage, action.microbatch].add(action.op)
    stages, m = range(plan.placement.num_stages), range(plan.num_microbatches)
    if set(ops) != {(s, i) for s in stages for i in (*m, None)}:
        return False
    for (stage, i), found in ops.items():
        if i is None:
            gradients = [n for a, (_, n) in place.items() if a.stage == stage and a.op in "BW"]
            if place[Action("G", stage)][1] < max(gradients, default=-1):
                return False
        elif found not in ({"F", "B"}, {"F", "I", "W"}):
            return False
        else:
            order = [place[Action(op, stage, i)][1] for op in "FBIW" if op in found]
            if order != sorted(order):
                return False
    for stage in stages:
        starts = [place[Action("F", stage, i)][1] for i in m]
        if starts != sorted(starts):
            return False
    return _sorted(plan, place)


def _sorted(plan, place):
    after = defaultdict(list)
    for row in plan.rows:
        for first, second in pairwise(row):
            after[first].append(second)
    for action in place:
        for before in (
            [Action("F", action.stage - 1, action.microbatch)]
            if action.op == "F"
            else [Action(op, action.stage + 1, action.microbatch) for op in "BI"]
            if action.op in "BI"
            else []
        ):
            if before in place:
                after[before].append(action)
    waits = Counter(target for targets in after.values() for target in targets)
    ready = [action for action in place if not waits[action]]
    done = 0
    while ready:
        done += 1
        for target in after[ready.pop()]:
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    return done == len(place)


@st.composite
def plans(draw):
    kind = draw(st.sampled_from(["1f1b", "zb-h1", "nanopipe", "zb-v", "dualpipev", "auto"]))
    p = draw(st.integers(2, 4))
    v = 2 if kind in ("zb-v", "dualpipev") else draw(st.integers(1, 3))
    m = draw(st.integers(2 * p, 2 * p + 3) if kind == "dualpipev" else st.integers(p, 2 * p + 1))
    return build_plan(ScheduleRequest(kind=kind), p, v, m)


def accepted(plan):
    try:
        check(plan)
    except ConfigError:
        return False
    simulate(plan)
    return True


@given(plans(), st.data())
@settings(max_examples=150, deadline=None)
def test_the_checker_accepts_exactly_the_steps(plan, data):
    """Plans after up to three exchanges, removals or copies of actions."""
    rows = [list(row) for row in plan.rows]
    for _ in range(data.draw(st.integers(0, 3))):
        row = rows[data.draw(st.integers(0, len(rows) - 1))]
        a = data.draw(st.integers(0, len(row) - 1))
        b = data.draw(st.integers(max(0, a - 6), min(len(row) - 1, a + 6)))
        match data.draw(st.sampled_from(["exchange", "move", "move", "remove", "copy", "rank"])):
            case "exchange":
                row[a], row[b] = row[b], row[a]
            case "move":
                row.insert(b, row.pop(a))
            case "remove":
                row.pop(a)
            case "copy":
                row.insert(b, row[a])
            case "rank":
                data.draw(st.sampled_from(rows)).append(row.pop(a))
    broken = replace(plan, rows=tuple(map(tuple, rows)))
    assert accepted(broken) == is_a_step(broken)


@given(plans(), st.data())
@settings(max_examples=60, deadline=None)
def test_removed_copied_and_misplaced_actions_are_never_accepted(plan, data):
    rows = [list(row) for row in plan.rows]
    rank = data.draw(st.integers(0, len(rows) - 1))
    number = data.draw(st.integers(0, len(rows[rank]) - 1))
    action = rows[rank][number]
    match data.draw(st.sampled_from(["remove", "copy", "rank", "forwards"])):
        case "remove":
            del rows[rank][number]
        case "copy":
            rows[rank].insert(number, action)
        case "rank":
            rows[(rank + 1) % len(rows)].append(rows[rank].pop(number))
        case "forwards":  # of two micro-batches: their messages change places in the channel
            a, b = (
                rows[rank].index(Action("F", plan.placement.stages[rank][0], i)) for i in (0, 1)
            )
            rows[rank][a], rows[rank][b] = rows[rank][b], rows[rank][a]
    assert not accepted(replace(plan, rows=tuple(map(tuple, rows))))


def test_an_order_of_an_extension_is_checked_and_reduced():
    def waiting(placement, m):
        """Rank 0 begins with the backward, which needs all other stages."""
        return tuple(
            tuple(Action(op, rank, i) for op in ("BF" if rank == 0 else "FB") for i in range(m))
            for rank in range(placement.ranks)
        )

    def gpipe(placement, m):
        return tuple(row[m:] + row[:m] if not rank else row for rank, row in rows(placement, m))

    def rows(placement, m):
        return enumerate(waiting(placement, m))

    plan = build_plan(ScheduleRequest(order=gpipe), 2, 1, 3)
    assert [row[-1] for row in plan.rows] == [Action("G", 0), Action("G", 1)]
    assert plan.name == "gpipe" and simulate(plan).peak_chunks == (3, 3)
    with pytest.raises(ConfigError, match="waiting"):
        build_plan(ScheduleRequest(order=waiting), 2, 1, 3)
