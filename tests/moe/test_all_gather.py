"""The all-gather dispatcher as a program: equal to Megatron's, its gathers hidden, fewer bytes."""

from __future__ import annotations

import pytest
import torch

from tests.moe import layer_ranks as jobs
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
GATHER = {"moe_token_dispatcher_type": "allgather"}
SHARED = {"moe_shared_expert_intermediate_size": 20}
VARIANTS = [{}, {"async_permutation": True}, {"overlap": True}]


def assert_equal(results, atol=1e-6):
    """Every program gives the output of Megatron's layer bit by bit, and its gradients."""
    for expected, *programs in results:
        for result in programs:
            assert result.output.equal(expected.output)
            assert result.gradients.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                torch.testing.assert_close(result.gradients[name], gradient, rtol=0, atol=atol)


@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("shared", [{}, SHARED], ids=["routed", "shared"])
def test_programs_equal_megatrons_layer(ranks, spec, shared):
    assert_equal(
        ranks(2, jobs.compare, spec, {"expert": 2}, {**GATHER, **shared}, VARIANTS, setup=ADAPTOR)
    )
