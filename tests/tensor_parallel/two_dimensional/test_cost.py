"""Bytes of the grid: the formulas, and what the layers of a large model send."""

from __future__ import annotations

import pytest

from mindspeed.attention import Mask
from mindspeed.attention.algorithm_costs import costs_of
from mindspeed.attention.cost_metrics import Sizes
from mindspeed.attention.strategy import Strategy
from mindspeed.tensor_parallel.two_dimensional.cost import (
    Widths,
    best_tp_2d,
    grids,
    one_dimensional,
    table,
    two_dimensional,
)
from tests.tensor_parallel.two_dimensional import fake_world
from tests.tensor_parallel.two_dimensional.fake_world import Layout

LLAMA_3_405B = Widths(hidden=16384, qkv=18432, proj=16384, fc1=106496, fc2=53248)
RATIOS = {8: (0.665, 0.646), 4: (0.794, 0.738), 2: (1.452, 1.321)}
GATHER, SCATTER, BACKWARD = "overlap_gather", "overlap_scatter", "overlap_backward"
OVERLAPS = {(): (3425.0, 1854.0), (GATHER,): (3048.4, 1854.0), (SCATTER, BACKWARD): (3105.1, 0.0)}


@pytest.fixture(scope="module")
def llama_405b(rank_pool):
    """Figures of every layout on 16 of 128 ranks, 8192 tokens."""
    layouts = [Layout(16), *map(Layout, RATIOS), *(Layout(8, overlaps) for overlaps in OVERLAPS)]
    job = (fake_world.figures, 128, 16, 8192, LLAMA_3_405B, layouts)
    (found,) = rank_pool.run(1, *job, setup="mindspeed.te", backend=None)
    return dict(zip(layouts, found, strict=True))


@pytest.mark.slow
def test_llama_405b_sends_what_the_formula_says(llama_405b):
    unit = 8192 * 2 // 16  # s b e / p
    plain, expected = llama_405b[Layout(16)].bytes, one_dimensional(LLAMA_3_405B, 16)
    assert plain == (unit * expected.forward, unit * expected.backward)
    for x, ratios in RATIOS.items():
        found, cost = llama_405b[Layout(x)].bytes, two_dimensional(LLAMA_3_405B, x, 16 // x)
        assert found == (unit * cost.forward, unit * cost.backward)
        assert tuple(round(a / b, 3) for a, b in zip(found, plain, strict=True)) == ratios, x


@pytest.mark.slow
def test_overlap_hides_communication_and_sends_the_same_bytes(llama_405b):
    """Modelled: 300 TFLOP/s, 200 GB/s, 10 us; sequence parallelism exposes 5073 and 3012 us."""
    assert llama_405b[Layout(16)].exposed == (5073.2, 3011.6)
    for overlaps, exposed in OVERLAPS.items():
        assert llama_405b[Layout(8, overlaps)].exposed == exposed
        assert llama_405b[Layout(8, overlaps)].bytes == llama_405b[Layout(8)].bytes


@pytest.mark.parametrize("y", [1, 2, 4, 8])
def test_ring_attention_over_y_sends_what_its_plan_says(y):
    heads, groups, size, tokens = 8, 2, 16, 64
    sizes = Sizes(heads, groups, size, size)  # of a rank: 1 / X of the model's
    ring = costs_of(Strategy("ring"), Mask.causal(tokens), y, sizes)
    widths = Widths(4 * heads * size, (heads + 2 * groups) * size, heads * size, 1, 1)
    expected = two_dimensional(widths, 1, y).ring * tokens * 2 // y
    assert ring.forward[0] + ring.backward[0] == expected


def test_the_best_grid_is_the_one_that_sends_least():
    best = best_tp_2d(LLAMA_3_405B, 16)
    assert (best.x, best.y) == (8, 2)
    totals = [cost.total for cost in grids(LLAMA_3_405B, 16)]
    assert best.total == min(totals) < one_dimensional(LLAMA_3_405B, 16).total
    assert [(cost.x, cost.y) for cost in grids(LLAMA_3_405B, 12)] == [
        (6, 2),
        (4, 3),
        (3, 4),
        (2, 6),
    ]


@pytest.mark.parametrize("ranks_", [2, 3, 4, 7])
def test_few_ranks_have_no_grid_that_sends_less(ranks_):
    assert best_tp_2d(LLAMA_3_405B, ranks_) is None


def test_the_table_has_a_line_for_every_grid():
    lines = table(LLAMA_3_405B, 16).splitlines()
    cells = [line.split() for line in lines[1:]]
    assert cells[0] == ["16", "x", "1", "1.000", "1.000", "1.000"]
    assert [row[3:5] for row in cells[1:]] == [[f"{a:.3f}", f"{b:.3f}"] for a, b in RATIOS.values()]
