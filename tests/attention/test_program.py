"""Which call of a program is the first on its queries: what it returns need not be merged."""

from __future__ import annotations

import pytest

from mindspeed.attention import Mask, planners, zigzag
from mindspeed.attention.calls import Pack
from mindspeed.attention.plan import OWN
from mindspeed.attention.program import Call, Step, Transfer, _mark_first, program
from mindspeed.attention.rows import Index

ASKED = 0  # the buffer of queries that arrived
NO_ROWS = Index([])
ASK = Transfer(0, False, OWN, NO_ROWS, (), (), ())


def call(first: int, last: int, queries: int = OWN) -> Call:
    """Work on queries ``[first, last)``."""
    return Call(Pack((), None), queries, Index([slice(first, last)]), OWN, NO_ROWS)


def marks(*steps: Step) -> list[list[bool]]:
    """What is marked, step by step."""
    _mark_first(list(steps))
    return [[one.first for one in step.calls] for step in steps]


def test_own_queries_are_new_once_over_all_steps():
    first = Step(calls=(call(0, 4), call(4, 8), call(0, 4)))
    second = Step(calls=(call(2, 6), call(8, 9)))
    assert marks(first, second) == [[True, True, False], [False, True]]


def test_queries_that_share_a_row_with_earlier_ones_are_known():
    assert marks(Step(calls=(call(0, 4), call(3, 9)))) == [[True, False]]


def test_queries_of_others_are_new_in_each_step():
    steps = [Step(ask=ASK, calls=(call(0, 4, ASKED), call(0, 4, ASKED))) for _ in range(2)]
    assert marks(*steps) == [[True, False], [True, False]]


def test_own_queries_and_those_of_others_are_different_ones():
    assert marks(Step(calls=(call(0, 4, ASKED), call(0, 4)))) == [[True, True]]


def test_own_queries_may_have_been_answered_by_others_after_a_step_that_asks():
    steps = Step(ask=ASK, calls=(call(0, 4),)), Step(calls=(call(4, 8), call(0, 4, ASKED)))
    assert marks(*steps) == [[True], [False, True]]
    assert marks(Step(ask=ASK), Step(), Step(calls=(call(0, 4),))) == [[], [], [False]]


@pytest.mark.parametrize("rank", range(4))
def test_a_ring_writes_its_first_part_and_merges_the_others(rank):
    plan = planners.ring(Mask.causal(48), zigzag(48, 4))
    steps = program(plan, rank, "forward").steps
    found = [[one.first for one in step.calls] for step in steps]
    assert all(found[0])
    assert not any(itself for step in found[1:] for itself in step)
