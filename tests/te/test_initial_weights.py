"""``--use-cpu-initialization``: every tensor-parallel size shards the same master weights.

Experts of the Transformer Engine spec are left out: Megatron draws each rank's from its own stream.
"""

from __future__ import annotations

import pytest
import torch

from tests.te import initial_ranks

ADAPTOR = "tests.support.warm"
CASES = {
    "te-gated": ("rmsnorm-swiglu-gqa", "te", 2),
    "te-biases": ("layernorm-gelu-bias", "te", 4),
    "te-latent": ("mla", "te", 2),
    "local-gated": ("rmsnorm-swiglu-gqa", "local", 2),
    "local-experts": ("moe-grouped", "local", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_start_from_the_weights_of_one(ranks, case):
    name, spec, size = CASES[case]
    build = initial_ranks.initial_weights
    (expected,) = ranks(1, build, name, spec, setup=ADAPTOR, timeout=240)
    for weights in ranks(size, build, name, spec, setup=ADAPTOR, timeout=240):
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
