"""Save policies: less is kept for backward, and nothing else changes, not one bit."""

from __future__ import annotations

import pytest

from mindspeed.moe.save.policy import ACT, ALL, LEVEL0, LEVEL1, X_ONLY
from tests.moe import layer_ranks as jobs
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
POLICIES = [ALL, ACT, X_ONLY, LEVEL0, LEVEL1]
SHARED = {"moe_shared_expert_intermediate_size": 20}


def assert_equal(expected, *results):
    for result in results:
        assert result.output.equal(expected.output)
        assert result.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            assert result.gradients[name].equal(gradient), name


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize("spec", ["te", "local"])
def test_policies_are_bit_equal(ranks, spec, overlap):
    variants = [{"overlap": overlap, "save": policy} for policy in POLICIES]
    for _, *results in ranks(2, jobs.compare, spec, {"expert": 2}, SHARED, variants, setup=ADAPTOR):
        assert_equal(*results)
