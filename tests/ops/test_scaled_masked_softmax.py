"""Masked softmax against the formula, and what it does with fully masked rows."""

from __future__ import annotations

import pytest
import torch

from mindspeed.instruments.saved import saved_for_backward
from mindspeed.ops import OperatorError
from mindspeed.ops.scaled_masked_softmax import scaled_masked_softmax
from mindspeed.testing.compare import assert_close_with_grads

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def formula(x, mask, scale):
    x = x * scale
    if mask is not None:
        x = x.masked_fill(mask, -10000.0)
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def leaf(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def some(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.6


@pytest.mark.parametrize("mask", [None, some(2, 1, 5, 7), some(1, 3, 5, 1), some(1, 1, 1, 7)])
def test_equals_the_formula(mask):
    assert_close_with_grads(
        lambda x: scaled_masked_softmax(x, mask, 0.7),
        lambda x: formula(x, mask, 0.7),
        (leaf(2, 3, 5, 7),),
        **EXACT,
    )


def test_causal_equals_a_triangle():
    triangle = torch.ones(6, 6, dtype=torch.bool).triu(1)[None, None]
    x = leaf(2, 3, 6, 6)
    assert_close_with_grads(
        lambda x: scaled_masked_softmax(x, None, 2.0, causal=True),
        lambda x: formula(x, triangle, 2.0),
        (x,),
        **EXACT,
    )
    wrong = formula(x, triangle.transpose(2, 3), 2.0)
    assert not torch.allclose(scaled_masked_softmax(x, None, 2.0, causal=True), wrong)


def test_numerical_gradients():
    mask = some(1, 2, 3, 4)
    mask[0, 0, 0] = False
    assert torch.autograd.gradcheck(lambda x: scaled_masked_softmax(x, mask, 0.7), leaf(1, 2, 3, 4))


def test_a_fully_masked_row_is_uniform_with_zero_gradient():
    x = leaf(1, 1, 2, 4)
    mask = torch.tensor([True, False])[None, None, :, None]
    y = scaled_masked_softmax(x, mask)
    y[0, 0, 0, 1].backward()
    assert torch.equal(y[0, 0, 0], torch.full((4,), 0.25, dtype=torch.float64))
    assert not x.grad.any()


def test_only_probabilities_and_mask_are_saved():
    x, mask = leaf(2, 2, 8, 8, dtype=torch.bfloat16), some(2, 1, 8, 8)
    with saved_for_backward() as saved:
        scaled_masked_softmax(x, mask, 0.5).sum().backward()
    assert saved.bytes == 2 * x.numel() + mask.numel()


def test_one_graph():
    x, mask = leaf(1, 2, 4, 4, dtype=torch.float32), some(1, 1, 4, 4)

    def loss(x):
        return scaled_masked_softmax(x, mask, 0.5).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(*(torch.autograd.grad(f(x), x) for f in (compiled, loss)))


X = torch.zeros(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scaled_masked_softmax(X.long(), None), "x: expected dtype float32, bfloat16"),
        (lambda: scaled_masked_softmax(X[0], None), "x: expected 4 dimensions"),
        (lambda: scaled_masked_softmax(X, X), "mask: expected dtype bool, got float32"),
        (lambda: scaled_masked_softmax(X, X[:, :2] > 0), "mask: expected dimensions of 1 or those"),
        (lambda: scaled_masked_softmax(X, None, causal=True), "x: expected sq == sk with causal"),
        (
            lambda: scaled_masked_softmax(X, X > 0, causal=True),
            "mask: expected None with causal, got a tensor",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(OperatorError, match=f"^mindspeed.ops.scaled_masked_softmax: {message}"):
        call()
