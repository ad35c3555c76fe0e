"""Rotary position embedding, forward and backward by one kernel.

A program rotates heads of tokens (in general: a piece of the dimension that cos and sin are spread
over, for one or more positions of the others), so cos and sin are read once a token: 4 bytes per
element in 16 bit, and what the table weighs. Few heads share a program with those of other tokens:
two heads alone keep too few bytes in flight to hide the latency of memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.triton import _launch

_PAIRS = 2048
"""Pairs of channels that one program holds in registers."""


def forward(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    """Rotate ``x``; see :mod:`mindspeed.ops.npu_rotary_position_embedding`.

    Args:
        x: 4 dimensions ``[..., D]``, fp32, bf16 or fp16.
        cos: 4 dimensions ``[..., r]``, r <= D, the others those of x or 1; dtype of x or fp32.
        sin: like cos.
        mode: 0 pairs the halves, 1 pairs neighbours.

    Returns:
        Shape and dtype of x.
    """
    return _rotate(x, cos, sin, mode, transposed=False)


def backward(dy: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    """Return ``dx`` with shape and dtype of ``dy [..., D]``; the others as in :func:`forward`."""
    return _rotate(dy, cos, sin, mode, transposed=True)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, mode: int, transposed: bool) -> Tensor:
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
    tokens = max(_PAIRS // (block * rows), 1)
    outers = x.shape[first] * x.shape[second]
    grid = (triton.cdiv(outers, tokens), triton.cdiv(x.shape[inner], rows))
    _launch.launch(
        _rotate_rows, grid, x, cos, sin, y, outers, x.shape[second], x.shape[inner], half, rest,
        *(x.stride(dim) for dim in order), *(y.stride(dim) for dim in order),
        *(0 if cos.shape[dim] == 1 else cos.stride(dim) for dim in order),
        SPREAD=cos.shape[inner] == 1, INTERLEAVED=bool(mode), TRANSPOSED=transposed,
        TOKENS=tokens, ROWS=rows, BLOCK=block,
        REST=triton.next_power_of_2(rest) if rest else 0, num_warps=4,
    )  # fmt: skip
    return y


@triton.jit
def _rotate_rows(
    x_ptr, cos_ptr, sin_ptr, y_ptr, outers, seconds, inners, half, rest,
    x_first, x_second, x_inner, y_first, y_second, y_inner, c_first, c_second, c_inner,
    SPREAD: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    outer = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    first, second = (outer // seconds).to(tl.int64), (outer % seconds).to(tl.int64)
    inner = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[None, :, None].to(tl.int64)
    real = (outer < outers) & (inner < inners)
    x_row = x_ptr + first * x_first + second * x_second + inner * x_inner
    y_row = y_ptr + first * y_first + second * y_second + inner * y_inner
    c_row, exists = first * c_first + second * c_second, outer < outers
    if SPREAD:
        c1, c2 = _pairs(cos_ptr + c_row, exists, half, TOKENS, 1, BLOCK, INTERLEAVED)
        s1, s2 = _pairs(sin_ptr + c_row, exists, half, TOKENS, 1, BLOCK, INTERLEAVED)
    else:
        c_row += inner * c_inner
        c1, c2 = _pairs(cos_ptr + c_row, real, half, TOKENS, ROWS, BLOCK, INTERLEAVED)
        s1, s2 = _pairs(sin_ptr + c_row, real, half, TOKENS, ROWS, BLOCK, INTERLEAVED)
    x1, x2 = _pairs(x_row, real, half, TOKENS, ROWS, BLOCK, INTERLEAVED)
    if TRANSPOSED:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)[None, None, :]
        y = tl.reshape(tl.join(y1, y2), [TOKENS, ROWS, 2 * BLOCK])
        tl.store(y_row + both, y, mask=real & (both < 2 * half))
    else:
        pair = tl.arange(0, BLOCK)[None, None, :]
        tl.store(y_row + pair, y1, mask=real & (pair < half))
        tl.store(y_row + half + pair, y2, mask=real & (pair < half))
    if REST:
        column = tl.arange(0, REST)[None, None, :]
        copied = tl.load(x_row + 2 * half + column, mask=real & (column < rest))
        tl.store(y_row + 2 * half + column, copied, mask=real & (column < rest))


@triton.jit
def _pairs(
    row, real, half, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)[None, None, :]
        x = tl.load(row + both, mask=real & (both < 2 * half), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [TOKENS, ROWS, BLOCK, 2]))
    else:
        pair = tl.arange(0, BLOCK)[None, None, :]
        inside = real & (pair < half)
        first = tl.load(row + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(row + half + pair, mask=inside, other=0.0).to(tl.float32)
    return first, second
