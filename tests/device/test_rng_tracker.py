"""Megatron's random-state tracker on the CPU, and the repair of nested forks."""

from __future__ import annotations

import importlib.util

import pytest

from tests.device import rng_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core"
)


@pytest.fixture(scope="module")
def results(rank_pool):
    return rank_pool.run(1, rng_ranks.all_results, timeout=120)[0]


def test_recomputed_dropout_masks_equal_the_forward_in_all_eight_cases(results):
    equal = results["masks_of_recomputation"]
    assert len(equal) == 8
    assert [case for case, same in equal.items() if not same] == []


def test_gradients_and_random_states_do_not_depend_on_recomputation(results):
    equal = results["gradients_with_and_without_recomputation"]
    assert len(equal) == 8
    assert [case for case, same in equal.items() if not same] == []


def test_the_defect_upstream_the_inner_fork_draws_other_numbers_when_recomputed(results):
    assert results["unrepaired_device_generator"] == [True, False]


def test_nested_forks_continue_one_stream_and_leave_the_host_generator_alone(results):
    assert results["forks_leave_the_host_generator_alone"] == [True] * 4


def test_saved_states_continue_the_stream_as_tensors_and_as_generators(results):
    assert results["states_round_trip_through_a_checkpoint"] == [True, True]


def test_a_step_that_is_computed_again_draws_the_same_numbers(results):
    assert results["steps_draw_the_same_again"] == [True] * 6
