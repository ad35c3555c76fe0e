"""Megatron's fused softmax runs, and equals its unfused one."""

from __future__ import annotations

import sys

import pytest
import torch

from mindspeed.features.registry import resolve
from tests.features import softmax_ranks
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"


@pytest.mark.parametrize("kind", ["causal", "padding", "no mask"])
def test_megatrons_fused_softmax_equals_its_own_formula(ranks, kind):
    ((fused, plain, ran),) = ranks(1, softmax_ranks.fused_and_plain, kind, setup=ADAPTOR)
    assert ran == ["forward", "backward"]
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-8)


def test_megatrons_flag_and_the_level_decide():
    on = {"masked_softmax_fusion": True}
    assert [feature.name for feature in resolve(on, "cpu").enabled] == ["masked-softmax"]
    assert not resolve({"masked_softmax_fusion": False}, "cpu").enabled
    assert not resolve(on | {"optimization_level": 0}, "cpu").enabled


def test_undo_restores_the_modules(ranks):
    assert ranks(1, softmax_ranks.modules_after_undo, setup=ADAPTOR) == [[]]
    assert "scaled_softmax_cuda" not in sys.modules
