"""Rules are true: functions are measured on two ranks in all directions that their rules accept."""

from __future__ import annotations

import pytest

pytest.importorskip("spmd_types")

from tests.support.trainer_job import SETUP
from tests.type_check import adjoint, faults

pytestmark = pytest.mark.timeout(600)  # the first test waits for all measurements


@pytest.fixture(scope="module")
def found(rank_pool) -> list[adjoint.Measured]:
    """What each of two ranks has measured."""
    return rank_pool.run(2, adjoint.measured, setup=SETUP, timeout=500)


@pytest.mark.slow
def test_every_function_of_the_library_has_a_rule(found):
    # A bare layer stands for a real one in a plan, on tensors without values; a forced run computes
    # with another run's values.
    assert found[0].without_rule == {"planner.count.bare._Passed", "compare.forced.Replace"}


def test_every_function_with_a_rule_is_measured(found):
    measured = {name for one in adjoint.CASES for name in one.names}
    assert found[0].functions - measured == set(adjoint.NOT_MEASURED)


def test_every_collective_of_two_halves_is_measured():
    from mindspeed.moe import collectives

    own = {
        name
        for name, one in vars(collectives).items()
        if getattr(one, "__module__", "") == collectives.__name__ and hasattr(one, "typed")
    }
    assert own - {"_Chained"} == set(adjoint.HALVES)  # which is another one, later


@pytest.mark.parametrize("index", range(len(adjoint.CASES)), ids=adjoint.case_names())
def test_what_a_rule_says_is_true_in_every_direction_that_it_accepts(found, index):
    """<f(x), dy> = <x, f'(dy)>, with the pairing that the types define."""
    for rank in found:
        directions = rank.cases[index]
        assert not isinstance(directions, str), directions
        assert directions, "the rule accepts nothing"
        for one in directions:
            assert one.ran, "the function is not in the graph"
            assert one.true, one


@pytest.mark.parametrize("index", range(len(faults.HIDDEN)), ids=[f.name for f in faults.HIDDEN])
def test_a_fault_inside_a_function_is_measured(found, index):
    assert all(rank.hidden[index] for rank in found)


NEWER = {"SinkhornKnopp"}  # than the supported Megatron


def functions_of_megatron() -> tuple[set[str], set[str]]:
    """The names that the table of rules has, and those of them that Megatron has."""
    from mindspeed.type_check import megatron

    names = {name for _, names in megatron._RULES for name in names.split()}
    return names, {one.__name__ for one in megatron.rules()}


def test_every_rule_has_a_function_of_megatron(ranks):
    ((names, found),) = ranks(1, functions_of_megatron, setup=SETUP, backend=None)
    assert names - found == NEWER
