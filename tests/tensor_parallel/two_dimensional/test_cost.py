"""Bytes of the grid: the formulas, and what the layers of a large model send."""

from __future__ import annotations

import pytest

from mindspeed.tensor_parallel.two_dimensional.cost import (
    Widths,
    best_tp_2d,
    grids,
    one_dimensional,
    table,
    two_dimensional,
)
from tests.tensor_parallel.two_dimensional import grid_ranks

LLAMA_3_405B = Widths(hidden=16384, qkv=18432, proj=16384, fc1=106496, fc2=53248)
RATIOS = {"8x2": (0.665, 0.646), "4x4": (0.794, 0.738), "2x8": (1.452, 1.321)}


def test_llama_405b_on_16_of_128_ranks_sends_what_the_formula_says(ranks):
    widths = LLAMA_3_405B
    shapes = (widths.hidden, widths.qkv, widths.proj, widths.fc1, widths.fc2)
    (sent,) = ranks(
        1, grid_ranks.bytes_of_a_fake_world, 128, 16, shapes, setup="mindspeed.te", backend=None
    )
    plain = one_dimensional(widths, 16)
    assert sent["1D"] == (1024 * plain.forward, 1024 * plain.backward)
    for name, ratios in RATIOS.items():
        cost = two_dimensional(widths, *map(int, name.split("x")))
        assert sent[name] == (1024 * cost.forward, 1024 * cost.backward)
        measured = tuple(round(a / b, 3) for a, b in zip(sent[name], sent["1D"], strict=True))
        assert measured == ratios, name


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
