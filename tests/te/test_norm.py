"""LayerNorm and RMSNorm against the formula in fp64."""

from __future__ import annotations

import pytest
import torch

from mindspeed.te import kernels
from mindspeed.te.norm import LayerNorm, RMSNorm


def formula(x, weight, bias, eps, zero_centered):
    x = x.double()
    weight = weight.double() + (1 if zero_centered else 0)
    if bias is None:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    return centered / (variance + eps).sqrt() * weight + bias.double()


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    ("dtype", "params_dtype", "atol"),
    [
        (torch.float32, torch.float32, 2e-6),
        (torch.bfloat16, torch.bfloat16, 4e-2),
        (torch.bfloat16, torch.float32, 4e-2),
        (torch.float32, torch.bfloat16, 4e-2),
        (torch.float64, torch.float32, 2e-6),
    ],
)
def test_norm_equals_the_formula(kind, zero_centered, dtype, params_dtype, atol):
    torch.manual_seed(0)
    norm = kind(16, eps=1e-5, zero_centered_gamma=zero_centered, params_dtype=params_dtype)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 2, 16).to(dtype).requires_grad_()
    y = norm(x)
    assert y.dtype == (params_dtype if params_dtype.itemsize == 2 else dtype)
    x2 = x.detach().double().requires_grad_()
    expected = formula(x2, norm.weight.detach(), getattr(norm, "bias", None), 1e-5, zero_centered)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=atol)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    expected.backward(cotangent.double())
    torch.testing.assert_close(x.grad.double(), x2.grad, rtol=0, atol=3 * atol)


def test_zero_centered_bf16_weight_is_not_rounded_when_one_is_added():
    norm = RMSNorm(4, zero_centered_gamma=True, params_dtype=torch.bfloat16)
    torch.nn.init.constant_(norm.weight, 2.0**-10)
    x = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    y = kernels.normalize(x, norm.weight, None, eps=norm.eps, rms=True, zero_centered_gamma=True)
    assert y[0, 0].item() == pytest.approx(1 + 2.0**-10, rel=2e-6)


def test_sequence_parallel_marks_the_parameters():
    for value in (True, False):
        norm = LayerNorm(4, sequence_parallel=value)
        assert [p.sequence_parallel for p in norm.parameters()] == [value, value]
    assert not hasattr(RMSNorm(4).weight, "sequence_parallel")


def test_names_in_the_state_dict():
    assert set(LayerNorm(4).state_dict()) == {"weight", "bias", "_extra_state"}
    assert set(RMSNorm(4).state_dict()) == {"weight", "_extra_state"}
