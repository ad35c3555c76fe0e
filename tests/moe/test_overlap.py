"""Overlapped programs compute what Megatron's own layer computes, and hide its collectives."""

from __future__ import annotations

import pytest
import torch

from tests.moe import layer_ranks as jobs
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
SHARED = {"moe_shared_expert_intermediate_size": 20}
VARIANTS = [{}, {"async_permutation": True}, {"overlap": True}]


@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("shared", [{}, SHARED], ids=["routed", "shared"])
def test_programs_equal_megatrons_layer(ranks, spec, shared):
    for expected, *results in ranks(
        2, jobs.compare, spec, {"expert": 2}, shared, VARIANTS, setup=ADAPTOR
    ):
        for result in results:
            assert result.output.equal(expected.output)
            assert result.gradients.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                torch.testing.assert_close(result.gradients[name], gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("shared", "exposed"), [({}, (3, 1)), (SHARED, (0, 0))])
def test_exposed_collectives(ranks, shared, exposed):
    for _, _, _, overlapped in ranks(
        2, jobs.compare, "te", {"expert": 2}, shared, VARIANTS, setup=ADAPTOR
    ):
        log = overlapped.log
        assert len(log.communications("forward")) + len(log.communications("backward")) == 7
        assert [len(log.exposed("forward")), len(log.exposed("backward"))] == list(exposed)
