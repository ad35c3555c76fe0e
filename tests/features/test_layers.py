"""Options of an attention layer, under tensor and context parallelism.

Both specs, against the formula in fp64. ``test_split_sequence`` has every algorithm; here are the
ways from Megatron's arguments to it.
"""

from __future__ import annotations

import pytest

from tests.features import layer_ranks
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"


def assert_small(results, count):
    for found in results:
        assert len(found) == count
        for key, error in found.items():
            assert error < 2e-6, key  # slopes and sinks are fp32


@pytest.mark.slow
def test_tensor_and_context_parallel(ranks):
    adaptive = layer_ranks.ADAPTIVE
    runs = (("te", "p2p"), ("local", "a2a"), ("local", adaptive))
    results = ranks(4, layer_ranks.errors, 2, 2, runs, setup=ADAPTOR, timeout=240)
    assert_small(results, len(runs) * len(layer_ranks.CASES))


def test_one_rank(ranks):
    runs = (("te", "p2p"), ("local", "p2p"))
    results = ranks(1, layer_ranks.errors, 1, 1, runs, setup=ADAPTOR)
    assert_small(results, len(runs) * len(layer_ranks.CASES | layer_ranks.ON_ONE_RANK))


def test_one_key_head_and_dropout_which_keeps_the_mean_and_repeats_with_its_seed(ranks):
    for errors, means in ranks(2, layer_ranks.two_ranks, setup=ADAPTOR):
        assert_small([errors], 3)
        for found in means:
            assert len(found) == 3
            for mean in found.values():
                assert mean == pytest.approx(1, abs=0.1)
