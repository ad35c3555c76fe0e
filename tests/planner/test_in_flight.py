"""Micro-batches in flight: what bounds take for granted, and what a count of a rank runs."""

from __future__ import annotations

import pytest

from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.planner.layout import Layout
from mindspeed.planner.search.bounds import _in_flight
from tests.support.lazy import Lazy

proof = Lazy("mindspeed.planner.time.whole_ranks")


def row_of(kind: str, ranks: int, chunks: int, count: int, rank: int):
    """Actions of a rank."""
    return build_plan(ScheduleRequest(kind), ranks, chunks, count).rows[rank]


def most_kept(row: tuple, ranks: int, chunks: int) -> list[list[int]]:
    """Micro-batches of each chunk that are kept after each action."""
    held, found = [0] * chunks, []
    for action in row:
        held[action.stage // ranks] += {"F": 1, "B": -1, "I": -1}.get(action.op, 0)
        found.append(list(held))
    return found


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (2, 2), (4, 2), (4, 3)])
@pytest.mark.parametrize("turns", [1, 2, 5])
def test_as_many_are_in_flight_as_the_bound_says(ranks, chunks, turns):
    count = ranks * turns
    layout = Layout(ranks, count, pp=ranks, vpp=chunks)
    kind = "interleaved" if chunks > 1 else "1f1b"
    for rank in range(ranks):
        kept = most_kept(row_of(kind, ranks, chunks, count, rank), ranks, chunks)
        assert _in_flight(layout, rank) in kept


@pytest.mark.parametrize(("kind", "chunks"), [("1f1b", 1), ("interleaved", 3), ("zb-v", 2)])
def test_a_short_step_has_as_many_in_flight(kind, chunks):
    from types import SimpleNamespace

    ranks, count = 4, 64
    request = ScheduleRequest(kind)
    shape = SimpleNamespace(micro_batches=count, ranks=ranks, chunks=chunks, request=request)
    for rank in range(ranks):
        short = proof.enough_micro_batches(shape, rank)
        most = [
            max(sum(one) for one in most_kept(row_of(kind, ranks, chunks, n, rank), ranks, chunks))
            for n in (short, count)
        ]
        assert most[0] == most[1]
        assert short < count / 2
