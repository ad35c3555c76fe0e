"""Micro-batches of different lengths through the pipeline: same losses, fewer messages."""

from __future__ import annotations

import pytest
import torch

from tests.adaptor import lengths_ranks

SETUP = "tests.support.warm"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("stages", "chunks"), [pytest.param(2, 1, marks=pytest.mark.slow), (4, 1), (2, 2)]
)
def test_lengths_that_all_ranks_know_are_not_sent(ranks, stages, chunks):
    results = ranks(stages, lengths_ranks.steps, stages, chunks, setup=SETUP, timeout=240)
    boundaries = (stages * chunks - 1) * len(lengths_ranks.LENGTHS)
    sent = {way: sum(rank[way]["sent"] for rank in results) for way in results[0]}
    assert sent == {
        "padded": 2 * boundaries,
        "Megatron": 4 * boundaries,
        "read": 3 * boundaries,
        "known": 2 * boundaries,
    }
    for rank in results:
        for way in ("Megatron", "read", "known"):
            assert rank[way]["losses"] == pytest.approx(rank["padded"]["losses"], rel=1e-6)
            for mine, padded in zip(
                rank[way]["gradients"], rank["padded"]["gradients"], strict=True
            ):
                torch.testing.assert_close(mine, padded, rtol=1e-6, atol=1e-6)
    assert len(results[-1]["known"]["losses"]) == len(lengths_ranks.LENGTHS)


def test_variable_lengths_in_evaluation(ranks):
    results = ranks(2, lengths_ranks.steps, 2, 1, True, setup=SETUP, timeout=240)
    for way in ("read", "known"):
        assert results[1][way]["losses"] == pytest.approx(results[1]["padded"]["losses"], rel=1e-6)
