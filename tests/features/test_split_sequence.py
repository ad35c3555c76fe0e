"""Attention of a module over a split sequence, by every strategy, is that of one rank in fp64."""

from __future__ import annotations

import pytest

from tests.features import context_ranks

SETUP = "tests.support.warm"


@pytest.mark.slow
def test_output_and_gradients_are_those_of_one_rank(ranks):
    for found in ranks(4, context_ranks.every_strategy, setup=SETUP, timeout=240):
        for name, errors in found.items():
            for batch, error in errors.items():
                assert error < 1e-12, (name, batch)


def test_overlap_groups_are_made_once_and_destroyed(ranks):
    results = ranks(4, context_ranks.overlap_groups, setup=SETUP, timeout=240)
    for rank, (members, more, left) in enumerate(results):
        assert members == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert (more, left) == (1, 0)


@pytest.mark.slow
def test_all_gather_in_chunks_receives_the_same_and_holds_less(ranks):
    """Keys and values of 4 ranks with 8 heads of 64 numbers for 128 tokens: 2 MiB."""
    held = {}
    for parts in (1, 2, 4):
        for peak, received, calls in ranks(
            4, context_ranks.held_by_an_all_gather, parts, setup=SETUP
        ):
            held.setdefault(parts, []).append(peak)
            assert received == 3 * 2 * 128 * 8 * 64 * 4 and calls == parts
    for whole, half, quarter in zip(*held.values(), strict=True):
        assert whole - quarter > 2**21 * 3 / 4
        assert whole - half == pytest.approx(2 * (half - quarter), rel=0.02)
