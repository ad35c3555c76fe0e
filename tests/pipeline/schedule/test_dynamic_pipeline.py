"""Micro-batches of different sizes train as equal ones with the same samples do."""

from __future__ import annotations

import pytest

from tests.pipeline.schedule.sized_ranks import MOE, Case, compare
from tests.pipeline.schedule.step_ranks import Layout

SETUP = "tests.support.warm"
PLAIN = {"dropout": 0.0}
PER_TOKEN = {"calculate_per_token_loss": True}


@pytest.mark.slow
def test_gradients_and_losses_equal_those_of_equal_sizes_on_two_ranks(ranks):
    two = Layout(pipeline=2, **PLAIN)
    cases = {
        "means": Case(two, (1, 2, 3, 2)),
        "sums": Case(two, (1, 2, 3, 2), loss="sum"),
        "per token": Case(Layout(pipeline=2, **PLAIN, config=PER_TOKEN), (1, 3, 2, 2), loss="sum"),
        "two chunks": Case(Layout(pipeline=2, chunks=2, **PLAIN), (1, 4, 1, 2), "interleaved"),
        "split backwards": Case(two, (1, 2, 3, 2), "zb-h1"),
        "experts": Case(Layout(pipeline=2, **PLAIN, config=MOE), (1, 4, 2, 1)),
    }
    for found in ranks(2, compare, cases, setup=SETUP):
        for name, differences in found.items():
            assert max(differences.values()) < 1e-6, (name, differences)
