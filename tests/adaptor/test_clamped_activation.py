"""The fused activation of experts equals the plain formula, clamped after the bias."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import needs

needs("megatron.core")

from mindspeed.adaptor.repairs.experts.clamped_activation import add_bias_first
from mindspeed.adaptor.versions import at_least

CLAMP, OFFSET = 0.7, 1.0
pytestmark = pytest.mark.skipif(not at_least("0.15"), reason="no clamp before 0.15")


def formula(x, bias, weights):
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(1.702 * gate) * (up + OFFSET) * weights


@pytest.mark.parametrize("repaired", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_outputs_and_gradients_equal_the_formula(with_bias, repaired):
    from megatron.core.fusions import fused_bias_geglu

    fused = fused_bias_geglu.weighted_bias_quick_geglu_impl
    fused = getattr(fused, "__wrapped__", fused)
    fused = add_bias_first(fused) if repaired else fused
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(*shape, generator=generator) for shape in ((6, 16), (16,), (6, 1))]
    found = []
    for function in (lambda *given: fused(*given, False, OFFSET, CLAMP), formula):
        x, bias, weights = (tensor.clone().requires_grad_() for tensor in inputs)
        out = function(x, bias if with_bias else None, weights)
        out.square().sum().backward()
        gradients = (x.grad, weights.grad, *([bias.grad] if with_bias else []))
        found.append((out.detach(), *gradients))
    same = all(torch.allclose(*pair, atol=1e-5) for pair in zip(*found, strict=True))
    assert same == (repaired or not with_bias)
