"""Sizes of micro-batches: what is accepted, what they save, what the search finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.micro_batch_sizes import (
    EXAMPLES,
    StepShape,
    loss_weight,
    parse_sizes,
)
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate
from mindspeed.pipeline.schedule.size_search import Prices, improved, search_sizes

# example, p, micro-batch size, samples -> bubble and T in slots of one sample, peak samples
FIGURES = {
    "example-config-1": (4, 4, 64, (36, 228, 16), (25, 217, 20)),
    "example-config-2": (8, 4, 96, (84, 372, 32), (64, 352, 40)),
}


def plan_of(p: int, sizes: tuple[int, ...]) -> Plan:
    plan = build_plan(ScheduleRequest(), p, 1, len(sizes))
    return Plan(plan.placement, plan.rows, plan.num_microbatches, sizes)


def prices(p: int, m: int, limit: float | None = None, **costs: float) -> Prices:
    return Prices(build_plan(ScheduleRequest(), p, 1, m), Costs(**costs), limit)


@pytest.mark.parametrize("name", FIGURES)
def test_examples_save_a_quarter_to_a_third_of_the_bubble(name):
    p, size, samples, equal, dynamic = FIGURES[name]
    sizes = parse_sizes(name, StepShape(p, size, samples))

    def figures(sizes):
        run = simulate(plan_of(p, sizes))
        return run.bubble_time, run.makespan, max(run.peak_memory)

    assert figures((size,) * len(sizes)) == equal
    assert figures(sizes) == dynamic
    gain = 1 - dynamic[1] / equal[1]
    assert gain == pytest.approx({4: 0.048, 8: 0.054}[p], abs=5e-4)


@pytest.mark.parametrize("name", FIGURES)
def test_no_local_search_improves_an_example_and_ours_finds_as_good(name):
    p, _, samples, _, (_, makespan, peak) = FIGURES[name]
    sizes = EXAMPLES[name].sizes
    price = prices(p, len(sizes))
    assert improved(sizes, price)[0] == (0, makespan, peak)
    assert price(np.array([search_sizes(p, 1, len(sizes), samples)])).tolist() == [
        [0, makespan, peak]
    ]


@pytest.mark.parametrize(
    ("p", "v", "m", "size", "slots"),
    [(2, 1, 4, 2, (30, 29)), (4, 1, 24, 4, (324, 311)), (4, 2, 16, 4, (210, 205.5))],
)
def test_searched_sizes_make_up_the_step_and_are_no_slower(p, v, m, size, slots):
    sizes = search_sizes(p, v, m, m * size)
    assert (len(sizes), sum(sizes), min(sizes) >= 1) == (m, m * size, True)
    plan = build_plan(ScheduleRequest(), p, v, m)
    found = [
        simulate(Plan(plan.placement, plan.rows, m, given)).makespan
        for given in ((size,) * m, sizes)
    ]
    assert found == list(slots)


def test_prices_are_those_of_the_simulator():
    sizes = (3, 1, 2, 5, 1, 4)
    costs = {"forward": 1.0, "input_gradient": 1.5, "weight_gradient": 0.5, "latency": 0.3}
    run = simulate(plan_of(3, sizes), Costs(**costs))
    (price,) = prices(3, 6, limit=7, **costs)(np.array([sizes])).tolist()
    assert price == pytest.approx([max(run.peak_memory) - 7, run.makespan, max(run.peak_memory)])


def test_memory_limit_bounds_the_search():
    limits = (None, 36, 34)
    found = [search_sizes(4, 1, 16, 128, memory_limit=limit) for limit in limits]
    price = prices(4, 16)(np.array(found))[:, 1:]
    assert price.tolist() == [[431, 40], [434, 36], [451, 34]]  # T, peak; 456 with 32 if equal


def test_search_keeps_equal_sizes_where_nothing_is_better():
    assert search_sizes(4, 1, 8, 8) == (1,) * 8
    assert search_sizes(4, 1, 16, 64, memory_limit=1) == (4,) * 16


def test_weights_of_losses_average_to_one_and_follow_the_sizes():
    weights = [loss_weight((1, 2, 3, 2), i) for i in range(4)]
    assert weights == [0.5, 1.0, 1.5, 1.0]


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("1,2,1", StepShape(2, 1, 4), "3 sizes are given and a step has 4 micro-batches"),
        ("1,2,2,2", StepShape(2, 2, 8), "add up to 7 samples and a step has 8"),
        ("0,4,2,2", StepShape(2, 2, 8), "micro-batch 0 has size 0"),
        ("2,-1,5,2", StepShape(2, 2, 8), "'2,-1,5,2' is neither a list of sizes"),
        ("example-config-3", StepShape(2, 2, 8), "nor example-config-1 or example-config-2"),
        (
            "example-config-1",
            StepShape(2, 4, 96),
            "example-config-1 needs --pipeline-model-parallel-size 4, not 2 and "
            "--global-batch-size / data-parallel size 64, not 96",
        ),
        ("example-config-2", StepShape(8, 2, 96), "needs --micro-batch-size 4, not 2"),
    ],
)
def test_sizes_that_do_not_suit_the_step_are_refused(text, shape, message):
    with pytest.raises(ValueError, match=message):
        parse_sizes(text, shape)


@pytest.mark.parametrize(
    ("kind", "p", "v", "m", "size"),
    [
        ("zb-h1", 2, 1, 6, 2),
        ("zb-h1", 4, 1, 8, 4),
        ("nanopipe", 4, 2, 8, 4),
        ("aiao", 4, 2, 8, 4),
    ],
)
def test_sizes_are_searched_for_the_schedule_that_runs(kind, p, v, m, size):
    """Sizes for 1F1B make zb-h1 slower than equal ones."""
    request = ScheduleRequest(kind=kind)
    found = search_sizes(p, v, m, m * size, request=request)

    def step(sizes):
        return simulate(build_plan(replace(request, sizes=sizes), p, v, m)).makespan

    assert step(found) <= step((size,) * m) + 1e-9
    assert step(found) <= step(search_sizes(p, v, m, m * size)) + 1e-9


def test_other_schedules_get_other_sizes():
    shape = (4, 1, 8, 32)
    assert search_sizes(*shape, request=ScheduleRequest(kind="zb-h1")) != search_sizes(*shape)
