"""SwiGLU against the formula written out, with bias and with row weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mindspeed.instruments.saved import saved_for_backward
from mindspeed.ops import OperatorError
from mindspeed.ops.swiglu import swiglu, weighted_swiglu
from mindspeed.testing.compare import assert_close_with_grads
from tests.ops.traffic import model_bytes, traffic

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SHAPES = [(4, 16), (2, 3, 34), (1, 2), (0, 8), (300, 1024)]


def formula(x, bias=None, weight=None, dim=-1):
    if bias is not None:
        x = x + bias
    gate, up = x.chunk(2, dim)
    y = gate / (1 + torch.exp(-gate)) * up
    return y if weight is None else y * weight


def leaf(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_bias_and_weight_equal_the_formula(shape):
    x, bias, weight = leaf(*shape), leaf(shape[-1], seed=1), leaf(*shape[:-1], 1, seed=2)
    assert_close_with_grads(swiglu, formula, (x,), **EXACT)
    assert_close_with_grads(lambda x, b: swiglu(x, bias=b), formula, (x, bias), **EXACT)
    assert_close_with_grads(
        weighted_swiglu, lambda x, w: formula(x, weight=w), (x, weight), **EXACT
    )


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_any_dimension_can_be_halved(dim):
    x = leaf(4, 6, 10)
    assert_close_with_grads(lambda x: swiglu(x, dim), lambda x: formula(x, dim=dim), (x,), **EXACT)
    strided = leaf(10, 6, 4)
    assert_close_with_grads(
        lambda x: swiglu(x.transpose(0, 2), dim),
        lambda x: formula(x.transpose(0, 2), dim=dim),
        (strided,),
        **EXACT,
    )


def test_numerical_gradients():
    x, bias, weight = leaf(3, 6), leaf(6, seed=1), leaf(3, 1, seed=2)
    assert torch.autograd.gradcheck(lambda x, b: swiglu(x, bias=b), (x, bias))
    assert torch.autograd.gradcheck(weighted_swiglu, (x, weight))


def test_the_second_half_is_not_the_gate():
    x = leaf(4, 16)
    up, gate = x.chunk(2, -1)
    assert not torch.allclose(swiglu(x), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_is_rounded_once(dtype):
    """The error is half a unit in the last place; Megatron's formula rounds silu, too."""
    x = leaf(64, 256, dtype=dtype)
    truth = formula(x.double()).detach()
    unit = torch.finfo(dtype).eps * 2.0 ** truth.abs().log2().floor()
    assert ((swiglu(x) - truth).abs() <= 0.51 * unit + torch.finfo(dtype).tiny).all()


def test_a_weight_in_fp32_keeps_its_dtype_in_the_gradient():
    x, weight = leaf(5, 8, dtype=torch.bfloat16), leaf(5, dtype=torch.float32)
    y = weighted_swiglu(x, weight)
    y.float().sum().backward()
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    assert weight.grad.shape == (5,)


def test_neither_input_nor_gradient_is_written_to():
    x, weight = leaf(6, 8, dtype=torch.float32), leaf(6, 1, dtype=torch.float32)
    kept, dy = x.detach().clone(), torch.ones(6, 4)
    y = weighted_swiglu(x, weight)
    y.backward(dy)
    assert torch.equal(x, kept) and torch.equal(dy, torch.ones(6, 4))


def test_bytes_saved_for_backward():
    x = leaf(64, 512, dtype=torch.bfloat16)
    elements = 64 * 256
    with saved_for_backward() as saved:
        swiglu(x.clone()).sum().backward()
    assert saved.bytes == 4 * elements
    with saved_for_backward() as saved:
        gate, up = x.clone().chunk(2, -1)
        (F.silu(gate) * up).sum().backward()
    assert saved.bytes == 6 * elements


def test_bytes_moved():
    """Per output element, in bf16: 10 + 26 by Megatron's formula, 6 + 10 by one kernel each."""
    x = leaf(64, 512, dtype=torch.bfloat16).detach()
    dy, elements = torch.ones(64, 256, dtype=torch.bfloat16), 64 * 256
    with traffic() as eager:
        gate, up = x.chunk(2, -1)
        F.silu(gate) * up
    assert eager.bytes == 10 * elements
    with traffic() as fused:
        y = torch.ops.mindspeed.swiglu(x, None, None)
        assert fused.bytes == model_bytes(x, y) == 6 * elements
        torch.ops.mindspeed.swiglu_backward(dy, x, None, None)
    assert (fused.bytes, fused.kernels) == (16 * elements, 2)


def test_one_graph_forward_and_backward():
    def loss(x, weight):
        return weighted_swiglu(x, weight).square().sum() + swiglu(x, 0).sum()

    x, weight = leaf(4, 8, dtype=torch.float32), leaf(4, 1, dtype=torch.float32)
    expected = torch.autograd.grad(loss(x, weight), (x, weight))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x, weight), (x, weight)), expected)


X = torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: swiglu(X.long()), "swiglu: x: expected dtype float32, bfloat16, float16, got int"),
        (lambda: swiglu(X, 0), "swiglu: x: expected an even size of dimension 0, got 3"),
        (lambda: swiglu(X, 2), "swiglu: dim: expected -2 to 1, got 2"),
        (lambda: swiglu(torch.tensor(1.0)), "swiglu: x: expected at least 1 dimension"),
        (lambda: swiglu(X, bias=torch.zeros(4)), r"swiglu: bias: expected shape \(8,\), got \(4,"),
        (lambda: swiglu(X.t(), 0, bias=torch.zeros(8)), "swiglu: dim: expected the last dimension"),
        (
            lambda: weighted_swiglu(X, torch.zeros(3, 2)),
            r"weighted_swiglu: weight: expected shape \(3, 1\), got \(3, 2\)",
        ),
        (
            lambda: weighted_swiglu(X, torch.zeros(3, dtype=torch.bfloat16)),
            "weighted_swiglu: weight: expected dtype float32, got bfloat16",
        ),
        (
            lambda: swiglu(X, bias=torch.zeros(8, device="meta")),
            "swiglu: bias: expected the device of x, cpu, got meta",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(OperatorError, match=f"^mindspeed.ops.{message}"):
        call()
