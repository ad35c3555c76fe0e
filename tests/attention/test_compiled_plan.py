"""The first call on its queries, whose output need not be merged."""

from __future__ import annotations

import pytest

from mindspeed.attention import Mask, planners, zigzag
from mindspeed.attention.compiled_plan import RankExchange, RankStage, RowIndex, VarlenCall
from mindspeed.attention.plan import OWN
from mindspeed.attention.plan_compiler import (
    RECEIVED_QUERIES,
    _mark_first_calls,
    compile_plan,
)
from mindspeed.attention.varlen_batches import VarlenBatch

NO_ROWS = RowIndex([])
QUERIES_OF_OTHERS = RankExchange(0, False, OWN, NO_ROWS, (), (), ())


def call(first: int, last: int, queries: int = OWN) -> VarlenCall:
    """Work on queries ``[first, last)``."""
    return VarlenCall(VarlenBatch((), None), queries, RowIndex([slice(first, last)]), OWN, NO_ROWS)


def marks(*stages: RankStage) -> list[list[bool]]:
    """The marks, stage by stage."""
    _mark_first_calls(list(stages))
    return [[one.first for one in stage.calls] for stage in stages]


def test_local_queries_are_new_once_over_all_stages():
    first = RankStage(calls=(call(0, 4), call(4, 8), call(0, 4)))
    second = RankStage(calls=(call(2, 6), call(8, 9)))
    assert marks(first, second) == [[True, True, False], [False, True]]


def test_queries_sharing_a_row_with_earlier_ones_are_not_new():
    assert marks(RankStage(calls=(call(0, 4), call(3, 9)))) == [[True, False]]


def test_remote_queries_are_new_in_each_stage():
    stages = [
        RankStage(
            q=QUERIES_OF_OTHERS, calls=(call(0, 4, RECEIVED_QUERIES), call(0, 4, RECEIVED_QUERIES))
        )
        for _ in range(2)
    ]
    assert marks(*stages) == [[True, False], [True, False]]


def test_local_and_remote_queries_are_distinct():
    assert marks(RankStage(calls=(call(0, 4, RECEIVED_QUERIES), call(0, 4)))) == [[True, True]]


def test_local_queries_may_have_remote_results_after_a_stage_that_sends_queries():
    stages = (
        RankStage(q=QUERIES_OF_OTHERS, calls=(call(0, 4),)),
        RankStage(calls=(call(4, 8), call(0, 4, RECEIVED_QUERIES))),
    )
    assert marks(*stages) == [[True], [False, True]]
    assert marks(RankStage(q=QUERIES_OF_OTHERS), RankStage(), RankStage(calls=(call(0, 4),))) == [
        [],
        [],
        [False],
    ]


@pytest.mark.parametrize("rank", range(4))
def test_a_ring_writes_its_first_part_and_merges_the_others(rank):
    plan = planners.ring(Mask.causal(48), zigzag(48, 4))
    stages = compile_plan(plan, rank, "forward").stages
    found = [[one.first for one in stage.calls] for stage in stages]
    assert all(found[0])
    assert not any(itself for stage in found[1:] for itself in stage)
