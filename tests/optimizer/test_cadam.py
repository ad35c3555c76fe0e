"""Cadam against its formula, and the storage of its moment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed.optimizer.cadam import CADAM, VECTOR_BLOCK, RowScaled, rows_of
from mindspeed.optimizer.rules import StepOptions

LR, BETA = 1e-3, 0.965


def step_options(**changed):
    values = {
        "step": 1.0,
        "lr": LR,
        "betas": (BETA, 0.0),
        "eps": 0.0,
        "weight_decay": 0.0,
        "bias_correction": True,
        "decoupled_weight_decay": True,
    }
    return StepOptions(**{**values, **changed})


def shard(parameter, start, stop):
    """A flat shard of ``parameter`` as the distributed optimizer has it."""
    flat = parameter.reshape(-1)[start:stop].clone()
    flat.parameter_shape, flat.parameter_start = parameter.shape, start
    return flat


def stored(value, param):
    """What is read after ``value`` was stored: the state, the stored tensor and the scales."""
    codec = RowScaled()
    kept, scale = codec.allocate(param), codec.allocate_extra(param)
    codec.encode(value, kept, scale, param)
    return codec.decode(kept, scale, param), kept, scale


@pytest.mark.parametrize("decoupled", [True, False])
def test_one_step_is_the_formula(decoupled):
    generator = torch.Generator().manual_seed(1)
    w, g, m = (torch.randn(5, 3, generator=generator) for _ in range(3))
    g[0], m[0] = 0, 0  # no sign
    options = step_options(weight_decay=0.1, decoupled_weight_decay=decoupled)
    weights, moments = [w.clone()], [m.clone()]
    CADAM.update(weights, [g.clone()], {"exp_avg": moments}, options)
    effective = g if decoupled else g + 0.1 * w
    moment = BETA * m + (1 - BETA) * effective
    expected = (w * (1 - LR * 0.1) if decoupled else w) - LR * moment.sign()
    torch.testing.assert_close(moments[0], moment, rtol=1e-6, atol=0)
    torch.testing.assert_close(weights[0], expected, rtol=1e-6, atol=1e-9)


def test_training_follows_a_moment_in_fp32():
    """A regression with noise: signs agree, and a weight is off by its own disagreements."""
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(64, 96, generator=generator) * torch.logspace(-3, 1, 64)[:, None]
    ours, theirs = torch.zeros(64, 96), torch.zeros(64, 96)
    codec, moment = RowScaled(), torch.zeros(64, 96)
    kept, scale = codec.allocate(ours), codec.allocate_extra(ours)
    codec.encode(torch.zeros_like(ours), kept, scale, ours)
    disagreements = torch.zeros(64, 96)
    for _ in range(100):
        noise = 0.1 * torch.randn(64, 96, generator=generator) * target.std(1, keepdim=True)
        grad = theirs - target + noise  # the same gradients for both
        mine = codec.decode(kept, scale, ours)
        CADAM.update([ours], [grad], {"exp_avg": [mine]}, step_options())
        codec.encode(mine, kept, scale, ours)
        CADAM.update([theirs], [grad.clone()], {"exp_avg": [moment]}, step_options())
        disagreements += mine.sign() != moment.sign()
    assert disagreements.sum() < 1e-4 * 100 * ours.numel()
    assert ((ours - theirs).abs() <= 2 * LR * disagreements + 1e-6).all()


def test_a_row_of_outliers_does_not_disturb_the_others():
    value = torch.full((3, 8), 1e-9)
    value[1] = 1e9
    read, _, scale = stored(value, value)
    torch.testing.assert_close(read, value, rtol=2**-11, atol=0)
    assert scale.shape == (3,)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([(7, 10), (1, 1), (3, 4, 5), (600,), (1, 256)]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([1e-30, 1e-6, 1.0, 1e6, 1e30]),
    st.integers(0, 2**31),
)
def test_storing_what_was_read_changes_no_bit(shape, first, last, size, seed):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(shape, generator=generator) * size
    start, stop = sorted((int(first * whole.numel()), int(last * whole.numel())))
    part = shard(whole, start, stop)
    read, kept, scale = stored(part, part)
    torch.testing.assert_close(read, part, rtol=2**-11, atol=size * 2**-30)
    again, kept_again, scale_again = stored(read, part)
    assert torch.equal(read, again)
    assert torch.equal(kept, kept_again) and torch.equal(scale, scale_again)


def test_a_peak_that_is_rounded_up_keeps_its_scale():
    value = torch.tensor([[1 - 2**-13, 2**-39]])  # the second one has no bit to spare
    read, _, scale = stored(value, value)
    again, _, scale_again = stored(read, value)
    assert torch.equal(scale, scale_again) and torch.equal(read, again)


def test_shards_have_the_scales_of_the_parameters_rows():
    value = torch.arange(1.0, 61).view(6, 10) * 8.0 ** torch.arange(6)[:, None]
    _, _, whole = stored(value, value)
    _, _, first = stored(shard(value, 0, 25), shard(value, 0, 25))
    _, _, second = stored(shard(value, 25, 60), shard(value, 25, 60))
    assert first.shape == (3,) and second.shape == (4,)
    assert torch.equal(first[:2], whole[:2]) and torch.equal(second[1:], whole[3:])


def test_bytes_are_2_per_weight_and_4_per_row():
    param = torch.nn.Parameter(torch.zeros(12, 40))
    codec = RowScaled()
    assert codec.allocate(param).nbytes == 2 * 480
    assert codec.allocate_extra(param).nbytes == 4 * 12
    vector = torch.zeros(VECTOR_BLOCK + 1)
    assert codec.allocate_extra(vector).numel() == 2
    assert rows_of(torch.zeros(())).length == VECTOR_BLOCK


@pytest.mark.parametrize("value", [torch.zeros(2, 4), torch.zeros(0, 4), torch.zeros(0)])
def test_zeros_and_nothing_stay_so(value):
    read, _, _ = stored(value, value)
    assert torch.equal(read, value)


def test_what_is_not_finite_stays_so_in_its_row_only():
    value = torch.ones(3, 4)
    value[0, 1], value[1, 2] = float("nan"), float("inf")
    read, _, _ = stored(value, value)
    assert read[0, 1].isnan() and read[1, 2].isinf() and torch.equal(read[2], value[2])
