"""Ranges of experts compute what the whole computes, and share its parameters."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import needs
from tests.te import expert_range_job as jobs

needs("megatron.core")

KINDS = {
    "grouped": ("te", {}, False),
    "grouped-bias": ("te", {"add_bias_linear": True}, False),
    "grouped-replaced": ("te", {}, True),
    "grouped-recompute": (
        "te",
        {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
        False,
    ),
    "sequential": ("te", {"moe_grouped_gemm": False}, False),
    "local-sequential": ("local", {"moe_grouped_gemm": False}, False),
    "local": ("local", {}, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_equal_the_whole(ranks, kind):
    ((expected, found),) = ranks(1, jobs.whole_and_ranges, *KINDS[kind], setup="tests.support.warm")
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-6)
    assert found[2] == expected[2]  # hooks of parameters run once
