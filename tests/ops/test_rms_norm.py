"""RMSNorm against the formula, torch, and Hugging Face's order of rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mindspeed.instruments.saved import saved_for_backward
from mindspeed.ops import OperatorError
from mindspeed.ops.rms_norm import rms_norm
from mindspeed.testing.compare import assert_close_with_grads
from tests.ops.traffic import model_bytes, traffic

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def formula(x, gamma, eps=1e-6, offset=0.0):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (gamma + offset)


def leaf(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(4, 16), (2, 3, 97), (5,), (3, 1), (0, 8), (2, 20480)], ids=str)
def test_equals_the_formula(shape, offset):
    assert_close_with_grads(
        lambda x, gamma: rms_norm(x, gamma, 1e-5, offset=offset),
        lambda x, gamma: formula(x, gamma, 1e-5, offset),
        (leaf(*shape), leaf(shape[-1], seed=1)),
        **EXACT,
    )


def test_rows_need_not_be_contiguous():
    assert_close_with_grads(
        lambda x, gamma: rms_norm(x.transpose(0, 2), gamma),
        lambda x, gamma: formula(x.transpose(0, 2), gamma),
        (leaf(6, 3, 4), leaf(6, seed=1)),
        **EXACT,
    )


def test_numerical_gradients():
    assert torch.autograd.gradcheck(
        lambda x, gamma: rms_norm(x, gamma, 0.1, offset=1.0), (leaf(3, 5), leaf(5, seed=1))
    )


def test_epsilon_is_applied():
    x, gamma = leaf(3, 8) * 1e-4, leaf(8, seed=1)
    torch.testing.assert_close(rms_norm(x, gamma, 1e-6), formula(x, gamma, 1e-6))
    assert not torch.allclose(rms_norm(x, gamma, 1e-6), formula(x, gamma, 0.0), rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_is_rounded_once_like_torch(dtype):
    """Hugging Face's Llama rounds before it multiplies with gamma, which is less exact."""
    x, gamma = leaf(64, 256, dtype=dtype), leaf(256, dtype=dtype, seed=1)
    truth = formula(x.double(), gamma.double()).detach()
    unit = (
        torch.finfo(dtype).eps
        * 2.0 ** truth.abs().clamp(min=torch.finfo(dtype).tiny).log2().floor()
    )

    def units(y):
        return ((y - truth).abs() / unit).max()

    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert units(rms_norm(x, gamma)) <= 0.51
    assert units(F.rms_norm(x, (256,), gamma, 1e-6)) <= 0.51
    assert units(normed.to(dtype) * gamma) > 0.6


def test_gamma_in_fp32_has_its_gradient_in_fp32():
    x, gamma = leaf(5, 8, dtype=torch.bfloat16), leaf(8, dtype=torch.float32, seed=1)
    y = rms_norm(x, gamma)
    y.float().sum().backward()
    assert (y.dtype, x.grad.dtype, gamma.grad.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )


def test_bytes_saved_for_backward():
    """2 per element in bf16 and 4 per row; torch's own keeps 8 where it has no fused kernel."""
    x, gamma = leaf(64, 256, dtype=torch.bfloat16), leaf(256, dtype=torch.bfloat16, seed=1)
    kept = {}
    for name, norm in {
        "ours": rms_norm,
        "torch": lambda x, gamma: F.rms_norm(x, (256,), gamma, 1e-6),
    }.items():
        with saved_for_backward() as saved:
            norm(x.clone(), gamma).sum().backward()
        kept[name] = saved.bytes - 2 * 256
    assert kept["ours"] == 2 * x.numel() + 4 * 64
    assert kept["torch"] >= 8 * x.numel()


def test_bytes_moved():
    """4 per element forward and 6 backward in bf16; the formula moves 36 and 92."""
    x, gamma = leaf(64, 1024, dtype=torch.bfloat16), leaf(1024, dtype=torch.bfloat16, seed=1)
    x, gamma = x.detach(), gamma.detach()
    with traffic() as fused:
        y, rstd = torch.ops.mindspeed.rms_norm(x, gamma, 1e-6, 0.0)
        assert fused.bytes == 4 * x.numel() + model_bytes(gamma, rstd)
        torch.ops.mindspeed.rms_norm_backward(y, x, gamma, rstd, 0.0)
    assert fused.kernels == 2
    assert fused.bytes == 10 * x.numel() + 2 * model_bytes(gamma, rstd) + 2 * 1024
    with traffic() as eager:
        formula(x.float(), gamma.float()).to(x.dtype)
    assert eager.bytes > 7 * 4 * x.numel()


def test_one_graph():
    x, gamma = leaf(4, 8, dtype=torch.float32), leaf(8, dtype=torch.float32, seed=1)

    def loss(x, gamma):
        return rms_norm(x, gamma).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        *(torch.autograd.grad(f(x, gamma), (x, gamma)) for f in (loss, compiled))
    )


X, G = torch.zeros(3, 8), torch.ones(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(X.long(), G), "x: expected dtype float32, bfloat16, float16, got int64"),
        (lambda: rms_norm(X, G[:4]), r"gamma: expected shape \(8,\), got \(4,\)"),
        (lambda: rms_norm(X, G.half()), "gamma: expected dtype float32, got float16"),
        (lambda: rms_norm(X, G, 0.0), "epsilon: expected a number greater than 0, got 0.0"),
        (lambda: rms_norm(torch.tensor(1.0), G), "x: expected at least 1 dimension"),
        (lambda: rms_norm(X, G.to("meta")), "gamma: expected the device of x, cpu, got meta"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(OperatorError, match=f"^mindspeed.ops.rms_norm: {message}"):
        call()
