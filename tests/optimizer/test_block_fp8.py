"""Moments of Adam in blocks of fp8."""

from __future__ import annotations

import pytest
import torch

from mindspeed.optimizer.block_fp8 import BLOCK, BlockFp8, RootBlockFp8


def stored(codec, value):
    """``value`` as the codec gives it back."""
    param = torch.empty_like(value)
    kept, extra = codec.allocate(param), codec.allocate_extra(param)
    codec.encode(value, kept, extra, param)
    return codec.decode(kept, extra, param)


def moments(*shape, seed=0):
    """Values over ten orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape).uniform_(-6, 4, generator=generator)
    return 10**size * torch.randn(shape, generator=generator).sign()


@pytest.mark.parametrize("shape", [(0,), (1,), (BLOCK,), (5 * BLOCK + 3,), (7, 100), ()], ids=str)
def test_what_is_stored_twice_is_the_same(shape):
    value = moments(*shape)
    once = stored(BlockFp8(), value)
    assert torch.equal(stored(BlockFp8(), once), once)
    square = stored(RootBlockFp8(), value.square())
    assert torch.equal(stored(RootBlockFp8(), square), square)


def test_the_error_is_an_eighth_of_a_value_or_of_the_smallest_normal_one():
    value = moments(40 * BLOCK)
    largest = value.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)
    error = (stored(BlockFp8(), value) - value).abs()
    assert (error <= value.abs() / 8 + 2 * largest / 448 / 512).all()
    root = stored(RootBlockFp8(), value.square()).sqrt()
    assert ((root - value.abs()).abs() <= value.abs() / 8 + 2 * largest / 448 / 512).all()


def test_a_strided_state_is_stored_by_its_elements():
    value = moments(300, 4).t()
    assert torch.equal(stored(BlockFp8(), value), stored(BlockFp8(), value.contiguous()))


def test_a_positive_second_moment_never_becomes_zero():
    value = torch.tensor([1.0, 1e-3, 1e-12, 1e-30, 0.0])
    back = stored(RootBlockFp8(), value)
    assert (back[:4] > 0).all() and back[4] == 0
    assert torch.equal(stored(RootBlockFp8(), torch.zeros(300)), torch.zeros(300))


def test_tiny_and_huge_blocks_keep_their_digits():
    for scale in (1e-38, 1e-20, 1e20, 3e38):
        value = torch.tensor([1.0, -0.5, 0.25]) * scale
        torch.testing.assert_close(stored(BlockFp8(), value), value, rtol=0.125, atol=0)


def test_small_changes_add_up():
    """A mean moves by 0.1 % in a step, the numbers of E4M3 are 6 to 12 % apart.

    After a thousand steps rounding to nearest would leave a sixth of it, rounding up 17 times it.
    """
    generator = torch.Generator().manual_seed(1)
    second = torch.zeros(16 * BLOCK)
    for _ in range(1000):
        gradient = torch.randn(second.shape, generator=generator)
        second = stored(RootBlockFp8(), 0.999 * second + 0.001 * gradient.square())
    assert second.mean().item() == pytest.approx(1 - 0.999**1000, rel=0.06)


def test_bytes_per_element():
    param = torch.zeros(1024)
    for codec in (BlockFp8(), RootBlockFp8()):
        nbytes = codec.allocate(param).nbytes + codec.allocate_extra(param).nbytes
        assert nbytes == param.numel() * (1 + 4 / 256)
