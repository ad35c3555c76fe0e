"""Causal convolution, forward and backward: a program per tile of tokens and channels.

Forward: each element is read once from memory (its repeats hit the cache) and written once. The
backward writes the gradient before SiLU in fp32, then convolves it with the taps reversed; the
gradients of weight and bias are partial sums per tile of tokens, then one sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.causal_conv1d import positions
from mindspeed.ops.triton import _launch

_TOKENS, _CHANNELS = 32, 128


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Sequence[int], silu: bool
) -> Tensor:
    """Return ``[t, c]`` in the dtype of x; see :mod:`mindspeed.ops.causal_conv1d`.

    Args:
        x: ``[t, c]``, fp32, bf16 or fp16.
        weight: ``[c, taps]``, any of these dtypes.
        bias: ``[c]``, likewise, or None.
        ends: of documents, from 0 to t.
    """
    tokens, channels = x.shape
    y = torch.empty_like(x)
    grid = (triton.cdiv(tokens, _TOKENS), triton.cdiv(channels, _CHANNELS))
    _launch.launch(
        _forward, grid, x, weight, bias, _since(ends, x), y, tokens, channels,
        TAPS=weight.shape[1], SILU=silu, T=_TOKENS, C=_CHANNELS, num_warps=4,
    )  # fmt: skip
    return y


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Sequence[int], silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias (``[0]`` without one), each in its dtype.

    Args:
        dy: ``[t, c]``, dtype of x; the others as for :func:`forward`.
    """
    (tokens, channels), taps, since = x.shape, weight.shape[1], _since(ends, x)
    grid = (triton.cdiv(tokens, _TOKENS), triton.cdiv(channels, _CHANNELS))
    options = {"TAPS": taps, "T": _TOKENS, "C": _CHANNELS, "num_warps": 4}
    wide = torch.float32
    dpre = torch.empty(x.shape, dtype=wide, device=x.device) if silu else dy
    sums = torch.empty(grid[0], taps + 1, channels, dtype=wide, device=x.device)
    dx = torch.empty_like(x)
    _launch.launch(
        _before_silu, grid, dy, x, weight, bias, since, dpre, sums, tokens, channels,
        SILU=silu, **options,
    )  # fmt: skip
    _launch.launch(_transposed, grid, dpre, weight, since, dx, tokens, channels, **options)
    total = sums.sum(0)
    dbias = total.new_empty(0) if bias is None else total[taps].to(bias.dtype)
    return dx, total[:taps].t().to(weight.dtype), dbias


def _since(ends: Sequence[int], x: Tensor) -> Tensor:
    return positions(ends, x.device)


@triton.jit
def _pre(
    x_ptr, weight_ptr, bias_ptr, t, since, c, channels,
    TAPS: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    inside = (c < channels)[None, :]
    pre = tl.zeros([T, C], tl.float32)
    for back in tl.static_range(TAPS):
        seen = (since >= back)[:, None] & inside
        x = tl.load(x_ptr + (t - back)[:, None] * channels + c[None, :], mask=seen, other=0.0)
        w = tl.load(weight_ptr + c * TAPS + (TAPS - 1 - back), mask=c < channels, other=0.0)
        pre += x.to(tl.float32) * w.to(tl.float32)[None, :]
    if bias_ptr is not None:
        pre += tl.load(bias_ptr + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    return pre


@triton.jit
def _forward(
    x_ptr, weight_ptr, bias_ptr, since_ptr, y_ptr, tokens, channels,
    TAPS: tl.constexpr, SILU: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    c = tl.program_id(1) * C + tl.arange(0, C)
    since = tl.load(since_ptr + t, mask=t < tokens, other=-1)
    y = _pre(x_ptr, weight_ptr, bias_ptr, t, since, c, channels, TAPS, T, C)
    if SILU:
        y = y * tl.sigmoid(y)
    inside = (t < tokens)[:, None] & (c < channels)[None, :]
    tl.store(y_ptr + t[:, None] * channels + c[None, :], y, mask=inside)


@triton.jit
def _before_silu(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, since_ptr, dpre_ptr, sums_ptr, tokens, channels,
    TAPS: tl.constexpr, SILU: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    c = tl.program_id(1) * C + tl.arange(0, C)
    since = tl.load(since_ptr + t, mask=t < tokens, other=-1)
    inside = (t < tokens)[:, None] & (c < channels)[None, :]
    place = t[:, None] * channels + c[None, :]
    dpre = tl.load(dy_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        pre = _pre(x_ptr, weight_ptr, bias_ptr, t, since, c, channels, TAPS, T, C)
        s = tl.sigmoid(pre)
        dpre *= s * (1.0 + pre * (1.0 - s))
        tl.store(dpre_ptr + place, dpre, mask=inside)
    sums_ptr += tl.program_id(0).to(tl.int64) * (TAPS + 1) * channels
    for back in tl.static_range(TAPS):
        seen = (since >= back)[:, None] & (c < channels)[None, :]
        x = tl.load(x_ptr + place - back * channels, mask=seen, other=0.0).to(tl.float32)
        at = sums_ptr + (TAPS - 1 - back) * channels + c
        tl.store(at, tl.sum(dpre * x, 0), mask=c < channels)
    tl.store(sums_ptr + TAPS * channels + c, tl.sum(dpre, 0), mask=c < channels)


@triton.jit
def _transposed(
    dpre_ptr, weight_ptr, since_ptr, dx_ptr, tokens, channels,
    TAPS: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    c = tl.program_id(1) * C + tl.arange(0, C)
    dx = tl.zeros([T, C], tl.float32)
    for back in tl.static_range(TAPS):
        # The token that many later saw this one, unless a document began in between.
        later = tl.load(since_ptr + t + back, mask=t + back < tokens, other=-1)
        seen = (later >= back)[:, None] & (c < channels)[None, :]
        place = (t + back)[:, None] * channels + c[None, :]
        d = tl.load(dpre_ptr + place, mask=seen, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + c * TAPS + (TAPS - 1 - back), mask=c < channels, other=0.0)
        dx += d * w.to(tl.float32)[None, :]
    inside = (t < tokens)[:, None] & (c < channels)[None, :]
    tl.store(dx_ptr + t[:, None] * channels + c[None, :], dx, mask=inside)
