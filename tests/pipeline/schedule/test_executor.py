"""Plans train as Megatron's own schedules do, to the last bit, and as one rank does.

Models have dropout where they are compared with Megatron's schedule, none where they are compared
with one rank, which draws other masks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate
from tests.pipeline.schedule.step_ranks import (
    Case,
    Layout,
    compare,
    one_rank,
    plans,
    with_given_groups,
)

SETUP = "tests.support.warm"
SLOW = Costs(1, 1.25, 0.75, latency=0.125)
ONE_CHUNK = [Case({"kind": "1f1b"}), Case({"kind": "zb-h1", "costs": SLOW})]
CHUNKS = [
    Case({"kind": "interleaved"}),
    Case({"kind": "nanopipe"}),
    Case({"kind": "zb-h1", "costs": SLOW}, 8),
    Case({"kind": "nanopipe", "swap": True}, tolerance=1e-6),  # what is on the host comes later
    Case({"kind": "aiao"}, group=4),
    Case({"kind": "aiao", "strict": True}, group=4),
]
TWO_RANKS = {
    "one chunk": (Layout(pipeline=2, num_layers=2), ONE_CHUNK),
    "two chunks, local spec": (
        Layout(pipeline=2, chunks=2, spec="local", num_layers=4),
        CHUNKS,
    ),
}
CHUNKS_OF_ONE = Layout(pipeline=2, chunks=2, num_layers=4)
OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {**OVERLAP, "use_distributed_optimizer": True}
GATHERED = {**SHARDED, "overlap_param_gather": True, "align_param_gather": True}
# Chunks of several layers are in "pipeline of four"; all schedules of two chunks are there and in
# "parameter gather", so that each way to divide a layer meets half of them.
FOUR_RANKS = {
    "pipeline of four": (Layout(pipeline=4), ONE_CHUNK),
    "pipeline of four, two chunks": (
        Layout(pipeline=4, chunks=2),
        [*CHUNKS, Case({"kind": "interleaved", "group_size": 8}, 8, group=8)],
    ),
    "data parallel, overlap": (replace(CHUNKS_OF_ONE, ddp=OVERLAP), CHUNKS),
    "data parallel": (Layout(pipeline=2, num_layers=2), ONE_CHUNK),
    "distributed optimizer": (replace(CHUNKS_OF_ONE, ddp=SHARDED), CHUNKS),
    "parameter gather": (replace(CHUNKS_OF_ONE, ddp=GATHERED), CHUNKS),
    "tensor and sequence parallel": (replace(CHUNKS_OF_ONE, tensor=2), CHUNKS[::2]),
    "tensor parallel, local spec": (
        Layout(pipeline=2, tensor=2, spec="local", num_layers=2),
        ONE_CHUNK,
    ),
    "context parallel": (replace(CHUNKS_OF_ONE, context=2), CHUNKS[1::2]),
}


def check(layouts, results):
    for name, (layout, cases) in layouts.items():
        for rank, result in enumerate(results):
            assert result[name][0] == [], (name, rank)
        for number, case in enumerate(cases):
            request = ScheduleRequest(**case.request)
            plan = build_plan(request, layout.pipeline, layout.chunks, case.num_microbatches)
            price = simulate(plan, request.costs)
            # One rank of each stage; ranks of a pipeline are as far apart as the others are many.
            done = [result[name][1][number] for result in results]
            done = done[:: len(results) // layout.pipeline]
            assert tuple(one.trace for one in done) == plan.rows
            assert max(one.end for one in done) == pytest.approx(price.makespan, rel=1e-12)
            if not request.swap:
                assert tuple(one.peak_chunks for one in done) == price.peak_chunks


@pytest.mark.slow
def test_plans_equal_megatrons_schedules_on_two_ranks(ranks):
    check(TWO_RANKS, ranks(2, compare, TWO_RANKS, setup=SETUP))


def test_groups_of_the_caller_are_used_and_made_once(ranks):
    layout = Layout(pipeline=2, num_layers=2)
    results = ranks(2, with_given_groups, layout, 123.0, setup=SETUP)
    assert results == [([], 0, 123.0)] * 2


@pytest.mark.weekly_cases(
    "distributed optimizer",
    "pipeline of four",
    "data parallel*",
    "context parallel",
    "parameter gather",
    "tensor parallel, local spec",
)  # is in "parameter gather"
@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_plans_equal_megatrons_schedules_on_four_ranks(name, ranks):
    layouts = {name: FOUR_RANKS[name]}
    check(layouts, ranks(4, compare, layouts, setup=SETUP, timeout=120))


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_plans_equal_one_rank(chunks, ranks):
    cases = ONE_CHUNK if chunks == 1 else CHUNKS
    (expected,) = ranks(1, one_rank, Layout(dropout=0.0), 4, setup=SETUP)
    cases = [Case(case.request) for case in cases]
    results = ranks(4, plans, Layout(pipeline=4, chunks=chunks, dropout=0.0), cases, setup=SETUP)
    for number in range(len(cases)):
        steps = [result[number] for result in results]
        assert steps[-1].losses == pytest.approx(expected.losses, rel=1e-6)
        gradients = {}
        for step in steps:
            gradients |= step.gradients
        assert gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)
