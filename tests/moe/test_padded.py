"""Padded dispatch computes what Megatron's own layer computes when there is room for all."""

from __future__ import annotations

import pytest
import torch

from tests.moe import deepspeed_ranks as jobs
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
SHARED = {"moe_shared_expert_intermediate_size": 20}


@pytest.mark.parametrize(
    ("ranks_", "spec", "layout", "overrides"),
    [
        (2, "te", {"expert": 2}, SHARED),
        (2, "local", {"expert": 2}, {}),
        (1, "te", {}, {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
        pytest.param(
            4, "te", {"expert": 2, "tensor": 2, "expert_tensor": 2}, SHARED, marks=pytest.mark.slow
        ),
        pytest.param(4, "te", {"expert": 4, "tensor": 2}, {}, marks=pytest.mark.slow),
    ],
)
def test_equal_to_megatrons_layer(ranks, ranks_, spec, layout, overrides):
    for expected, *results in ranks(ranks_, jobs.padded, spec, layout, overrides, setup=ADAPTOR):
        for result in results:
            torch.testing.assert_close(result.output, expected.output, rtol=0, atol=1e-6)
            assert result.gradients.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                torch.testing.assert_close(result.gradients[name], gradient, rtol=0, atol=2e-6)
        names = {event.name for event in results[0].log.communications("forward")}
        assert names <= {"dispatch.rows", "combine.rows", "gather.rows", "scatter.rows"}, names
