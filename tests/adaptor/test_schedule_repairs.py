"""Repairs of Megatron's schedules: the defect without them, the right result with them."""

from __future__ import annotations

from tests.adaptor import schedule_ranks

ADAPTOR = "tests.support.warm"


def test_an_output_lives_until_it_is_sent(ranks):
    broken = ranks(2, schedule_ranks.late_sends, False, setup=ADAPTOR, timeout=240)
    assert all(lost for rank in broken for lost, _ in rank.values())
    assert any(pending for rank in broken for _, pending in rank.values())
    for rank in ranks(2, schedule_ranks.late_sends, True, setup=ADAPTOR, timeout=240):
        assert set(rank.values()) == {(0, 0)}
