"""Triangle attention equals dense causal attention and computes the documented products."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mindspeed.attention.triangle import TriangleAttention, area
from mindspeed.errors import ConfigError

BATCH, HEADS, HEAD = 2, 3, 8


def tensors(size):
    generator = torch.Generator().manual_seed(size)
    shape = (BATCH, HEADS, size, HEAD)
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]


def dense(q, k, v, hidden, scale=1.0):
    scores = (scale * q @ k.transpose(2, 3)).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def causal(size):
    return torch.ones(1, 1, size, size).triu(1).bool()


def assert_equal(attention, size, mask=None, hidden=None, scale=1.0):
    qkv = tensors(size)
    out = attention(*qkv, mask)
    assert out.shape == (size, BATCH, HEADS * HEAD)
    weight = torch.linspace(-1, 2, out.numel()).view(out.shape)
    grads = torch.autograd.grad((out * weight).sum(), qkv)
    expected = dense(*qkv, causal(size) if hidden is None else hidden, scale)
    wanted = torch.autograd.grad((expected * weight).sum(), qkv)
    for got, truth in zip((out, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(got, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mask", ["given", "causal"])
def test_equals_dense_attention_of_two_lengths_in_turn(mask):
    attention = TriangleAttention(block_size=16)
    for size in (64, 75, 9, 64):  # divisible, with a rest, less than a block, the first again
        assert_equal(attention, size, causal(size) if mask == "given" else None)


def test_a_mask_may_hide_more_than_later_keys():
    size = 40
    hidden = causal(size).clone()
    hidden[..., 20:, :5] = True
    assert_equal(TriangleAttention(block_size=16), size, hidden, hidden)


def test_the_given_softmax_and_dropout_are_used():
    def softmax(scores, mask):
        return (0.25 * scores).masked_fill(mask, -1e4).softmax(-1)

    dropped = []
    attention = TriangleAttention(16, softmax, lambda p: dropped.append(p.shape) or p)
    assert_equal(attention, 40, scale=0.25)
    assert dropped == [(2, 3, 16, 16), (2, 3, 16, 32), (2, 3, 8, 40)]


@pytest.mark.parametrize(("size", "block"), [(128, 32), (100, 32), (32, 64)])
def test_products_have_the_planned_area(size, block):
    with FlopCounterMode(display=False) as flops:
        TriangleAttention(block)(*tensors(size))
    assert flops.get_total_flops() == 4 * BATCH * HEADS * HEAD * area(size, block)


def test_fraction_of_the_square_computed():
    assert area(2048, 512) == 0.625 * 2048**2
    assert area(2048, 128) == 0.53125 * 2048**2


def test_a_block_has_a_query():
    with pytest.raises(ConfigError, match="block_size 0 must be at least 1"):
        TriangleAttention(0)
