"""Moments of Adam in blocks of fp8."""

from __future__ import annotations

import pytest
import torch

from mindspeed.optimizer.block_fp8 import BLOCK, SMALL, BlockFp8, RootBlockFp8, keeps_fp32
from mindspeed.optimizer.codecs import Occasion


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
    second, codec = torch.zeros(16 * BLOCK), RootBlockFp8()
    for _ in range(1000):
        gradient = torch.randn(second.shape, generator=generator)
        second = stored(codec, 0.999 * second + 0.001 * gradient.square())
    assert second.mean().item() == pytest.approx(1 - 0.999**1000, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.95, 0.95)], ids=str)
@pytest.mark.parametrize("period", [1, 50])
def test_moments_follow_fp32_ones_where_gradients_are_rare(betas, period):
    """Rare tokens, idle experts: a moment without gradient must decay as it does in fp32."""
    generator = torch.Generator().manual_seed(2)
    param = torch.zeros(8 * BLOCK)
    codecs = BlockFp8(), RootBlockFp8()
    kept = [(codec.allocate(param).zero_(), codec.allocate_extra(param)) for codec in codecs]
    exact = [torch.zeros_like(param), torch.zeros_like(param)]
    moved = torch.zeros(2, dtype=torch.float64)
    seconds = torch.zeros(2, dtype=torch.float64)
    for step in range(1, 801):
        gradient = torch.randn(param.shape, generator=generator) * (step % period == 0)
        added = gradient, gradient.square()
        narrow = [c.decode(*k, param) for c, k in zip(codecs, kept, strict=True)]
        for moments in (exact, narrow):
            for moment, beta, new in zip(moments, betas, added, strict=True):
                moment.mul_(beta).add_(new, alpha=1 - beta)
        for name, codec, moment, (stored_, extra) in zip("mv", codecs, narrow, kept, strict=True):
            codec.at(Occasion(step, name)).encode(moment, stored_, extra, param)
        for at, (first, second) in enumerate((exact, narrow)):
            if step > 400:
                root = (second / (1 - betas[1] ** step)).sqrt() + 1e-8
                moved[at] += (first / (1 - betas[0] ** step) / root).abs().sum()
                seconds[at] += second.sum()
    assert 1 / 1.05 < seconds[1] / seconds[0] < 1.05
    assert 1 / 1.05 < moved[1] / moved[0] < 1.05


def test_random_numbers_follow_step_state_and_position():
    value = torch.full((4 * BLOCK,), 1.05)
    value[::BLOCK] = 448.0  # the scale is 1

    def encoded(part, *occasion):
        param = torch.empty_like(part)
        kept, extra = BlockFp8().allocate(param), BlockFp8().allocate_extra(param)
        BlockFp8().at(Occasion(*occasion)).encode(part, kept, extra, param)
        return kept.float()

    whole = encoded(value, 7, "exp_avg")
    assert torch.equal(encoded(value, 7, "exp_avg"), whole)
    assert torch.equal(encoded(value[BLOCK:], 7, "exp_avg", BLOCK), whole[BLOCK:])
    for other in ((8, "exp_avg"), (7, "exp_avg_sq"), (7, "exp_avg", BLOCK)):
        assert not torch.equal(encoded(value, *other), whole)
    steps = torch.stack([encoded(value, step, "exp_avg") for step in range(400)])
    rare = steps[:, torch.arange(len(value)) % BLOCK != 0]
    # 0.4 of a step above 1: five standard deviations, of each element and of each step.
    assert ((rare.mean(0) - 1.05).abs() < 5 * 0.0613 / 400**0.5).all()
    assert ((rare.mean(1) - 1.05).abs() < 5 * 0.0613 / len(rare[0]) ** 0.5).all()


def test_small_and_marked_parameters_keep_fp32_moments():
    small, large = torch.empty(SMALL - 1), torch.empty(64, SMALL // 64)
    shard, marked = torch.empty(8), torch.empty(SMALL)
    shard.parameter_shape, marked.rare_gradients = (64, SMALL // 64), True
    assert [keeps_fp32(t) for t in (small, large, shard, marked)] == [True, False, False, True]


def test_bytes_per_element():
    param = torch.zeros(1024)
    for codec in (BlockFp8(), RootBlockFp8()):
        nbytes = codec.allocate(param).nbytes + codec.allocate_extra(param).nbytes
        assert nbytes == param.numel() * (1 + 4 / 256)
