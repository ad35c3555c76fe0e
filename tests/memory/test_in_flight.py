"""Micro-batches in flight by the formula are those that Megatron's schedules hold when they run."""

from __future__ import annotations

from types import SimpleNamespace

from mindspeed.memory.in_flight import held_at_once, most_held
from tests.memory.in_flight_ranks import counted_and_run

# stages, chunks, micro-batches, micro-batches of a chunk in a row
CASES = [
    (1, None, 3, None), (2, None, 1, None), (2, None, 5, None), (4, None, 2, None),
    (4, None, 8, None), (2, 2, 2, 2), (2, 2, 6, 2), (2, 3, 4, 2), (2, 2, 8, 4), (4, 2, 8, 4),
    (4, 4, 4, 4), (3, 2, 9, 3), (2, 2, 5, 3),
    (2, None, 40, None), (2, 2, 40, 2), (2, 2, 41, 3),
]  # fmt: skip


def test_equal_the_schedules_that_ran(ranks):
    (found,) = ranks(1, counted_and_run, CASES, setup="tests.support.warm")
    assert len(found) == sum(case[0] for case in CASES)
    for where, (counted, seen) in found.items():
        assert counted <= seen, where
        for state in seen:  # nothing that was held is more than what was counted
            assert any(all(a <= b for a, b in zip(state, most, strict=True)) for most in counted), (
                where
            )
        assert most_held(counted) == tuple(map(max, zip(*seen, strict=True))), where


def test_a_step_of_any_number_of_micro_batches_is_counted_at_once():
    from mindspeed.memory.megatron_in_flight import held_by_stage

    for chunks, held in ((None, {(2,)}), (2, {(3, 2), (4, 1)})):
        config = SimpleNamespace(
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=chunks,
            microbatch_group_size_per_vp_stage=None,
            overlap_moe_expert_parallel_comm=False,
        )
        assert held_by_stage(0, 2**31 - 2, config) == held


def test_plain_pipeline_holds_its_distance_from_the_end():
    assert held_at_once([0] * 8, warm_up=3) == {(4,)}
    assert held_at_once([0] * 2, warm_up=3) == {(2,)}


def test_interleaved_chunks_are_not_at_their_most_together():
    """Docstring's example: a plan that looks at the first full moment alone would miss (4, 1)."""
    moments = held_at_once([0, 0, 1, 1, 0, 0, 1, 1], warm_up=4)
    assert moments == {(3, 2), (4, 1)}
    assert most_held(moments) == (4, 2)
