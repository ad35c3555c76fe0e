"""Rotary position embedding, forward and backward by one kernel.

A program rotates one token's heads (in general: a piece of the dimension that cos and sin are
spread over), so cos and sin are read once a token: 4 bytes per element in 16 bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mindspeed.ops.triton import _launch

_PAIRS = 2048
"""Pairs of channels that one program holds in registers."""


def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int) -> torch.Tensor:
    """See :mod:`mindspeed.ops.npu_rotary_position_embedding`."""
    return _rotate(x, cos, sin, mode, transposed=False)


def backward(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int) -> torch.Tensor:
    """Return ``dx``."""
    return _rotate(dy, cos, sin, mode, transposed=True)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int, transposed: bool
) -> torch.Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    spread = [dim for dim in range(3) if cos.shape[dim] == 1]
    inner = max(spread or [2], key=lambda dim: x.shape[dim])
    first, second = (dim for dim in range(3) if dim != inner)
    order = (first, second, inner)
    half, rest = cos.shape[-1] // 2, x.shape[-1] - cos.shape[-1]
    block = triton.next_power_of_2(half)
    rows = min(max(_PAIRS // block, 1), triton.next_power_of_2(max(x.shape[inner], 1)))
    grid = (x.shape[first] * x.shape[second], triton.cdiv(x.shape[inner], rows))
    _launch.launch(
        _rotate_rows, grid, x, cos, sin, y, x.shape[second], x.shape[inner], half, rest,
        *(x.stride(dim) for dim in order), *(y.stride(dim) for dim in order),
        *(0 if cos.shape[dim] == 1 else cos.stride(dim) for dim in order),
        SPREAD=cos.shape[inner] == 1, INTERLEAVED=bool(mode), TRANSPOSED=transposed,
        ROWS=rows, BLOCK=block, REST=triton.next_power_of_2(rest) if rest else 0, num_warps=4,
    )  # fmt: skip
    return y


@triton.jit
def _rotate_rows(
    x_ptr, cos_ptr, sin_ptr, y_ptr, seconds, inners, half, rest,
    x_first, x_second, x_inner, y_first, y_second, y_inner, c_first, c_second, c_inner,
    SPREAD: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    first = (tl.program_id(0) // seconds).to(tl.int64)
    second = (tl.program_id(0) % seconds).to(tl.int64)
    inner = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    real = inner < inners
    x_row = x_ptr + first * x_first + second * x_second + inner.to(tl.int64) * x_inner
    y_row = y_ptr + first * y_first + second * y_second + inner.to(tl.int64) * y_inner
    c_row = first * c_first + second * c_second
    if SPREAD:
        at = c_row + tl.zeros([1, 1], tl.int64)
        c1, c2 = _pairs(cos_ptr + at, at >= 0, half, 1, BLOCK, INTERLEAVED)
        s1, s2 = _pairs(sin_ptr + at, at >= 0, half, 1, BLOCK, INTERLEAVED)
    else:
        at = c_row + inner.to(tl.int64) * c_inner
        c1, c2 = _pairs(cos_ptr + at, real, half, ROWS, BLOCK, INTERLEAVED)
        s1, s2 = _pairs(sin_ptr + at, real, half, ROWS, BLOCK, INTERLEAVED)
    x1, x2 = _pairs(x_row, real, half, ROWS, BLOCK, INTERLEAVED)
    if TRANSPOSED:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)[None, :]
        y = tl.reshape(tl.join(y1, y2), [ROWS, 2 * BLOCK])
        tl.store(y_row + both, y, mask=real & (both < 2 * half))
    else:
        pair = tl.arange(0, BLOCK)[None, :]
        tl.store(y_row + pair, y1, mask=real & (pair < half))
        tl.store(y_row + half + pair, y2, mask=real & (pair < half))
    if REST:
        column = tl.arange(0, REST)[None, :]
        copied = tl.load(x_row + 2 * half + column, mask=real & (column < rest))
        tl.store(y_row + 2 * half + column, copied, mask=real & (column < rest))


@triton.jit
def _pairs(
    row, real, half, ROWS: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)[None, :]
        x = tl.load(row + both, mask=real & (both < 2 * half), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [ROWS, BLOCK, 2]))
    else:
        pair = tl.arange(0, BLOCK)[None, :]
        inside = real & (pair < half)
        first = tl.load(row + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(row + half + pair, mask=inside, other=0.0).to(tl.float32)
    return first, second
