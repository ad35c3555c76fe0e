"""Schedules that recompute train as Megatron's interleaved schedule without recomputation does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.simulate import simulate
from tests.pipeline.schedule.recompute_ranks import compare
from tests.pipeline.schedule.step_ranks import Layout

SETUP = "tests.support.warm"
BUBBLE, ADVANCE = {"recompute": "bubble"}, {"recompute": "advance"}


def check(ranks: list[dict[str, dict[str, Any]]], planned: dict[str, tuple[int, ...]]) -> None:
    """Bits, second runs of layers, and bytes.

    Args:
        ranks: what ``compare`` found on each rank.
        planned: for each case the recomputed chunks of each rank.
    """
    for name, expected in planned.items():
        found = [rank[name] for rank in ranks]
        assert [case["differ"] for case in found] == [[]] * len(found), name
        assert tuple(case["planned"] for case in found) == expected, name
        for case, count in zip(found, expected, strict=True):
            assert case["figures"].reruns == count * case["layers"], name


def check_bytes(ranks: list[dict[str, Any]]) -> None:
    """What layers hold at the fullest moment is what the chunks of the plan hold, on every rank.

    A chunk holds what layers that are recomputed drop and keep, by the figures of the engine.
    """
    figures, layers = ranks[0]["figures"], ranks[0]["layers"]
    dropped, kept = (x / figures.calls * layers for x in (figures.dropped, figures.kept))
    plan = ranks[0]["plan"]
    peaks = simulate(plan, Costs(input_share=kept / (kept + dropped))).peak_memory
    for rank, peak in zip(ranks, peaks, strict=True):
        planned = peak * plan.placement.chunks * (kept + dropped)
        assert rank["bytes"] == pytest.approx(planned, rel=0.05)


def test_two_ranks_train_to_the_same_bits(ranks):
    layout = Layout(pipeline=2, chunks=2)
    cases = {
        "bubble": (layout, BUBBLE, 8, None),
        "advance": (layout, ADVANCE, 4, None),
        "advance, one layer": (replace(layout, spec="local"), ADVANCE, 4, 1),
    }
    found = ranks(2, compare, cases, setup=SETUP, timeout=60)
    check(found, {"bubble": (3, 0), "advance": (8, 4), "advance, one layer": (8, 4)})
    for name in ("bubble", "advance"):
        check_bytes([rank[name] for rank in found])
