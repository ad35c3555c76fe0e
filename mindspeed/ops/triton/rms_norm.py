"""RMSNorm forward and backward.

Forward: a program takes a tile of rows, ``TILE`` elements or one row if that is wider; 4 bytes per
element moved in 16 bit. Backward: a few programs per multiprocessor walk over tiles of rows, the
loads of the next tiles under way while one is computed; each keeps its part of dgamma in registers
and writes it once; one sum over the programs follows. 6 bytes per element. Rows wider than
``WIDEST_ROW`` are read twice, tile by tile (the second time from cache), and dgamma is reduced by a
kernel of its own. A slice of the last dimension is read where it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.triton import _launch
from mindspeed.ops.triton._launch import WIDEST_ROW, as_rows, multiprocessors, row_tile

_TILE = 4096
_BACKWARD_TILE = 2048
_WARPS_PER_MULTIPROCESSOR = 16
_WIDEST_PIPELINED = 8192
"""Wider rows keep enough bytes in flight alone, and the registers for more stages do not exist."""


def forward(x: Tensor, gamma: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return ``(y, rstd)``; see :mod:`mindspeed.ops.rms_norm`.

    Args:
        x: ``[..., H]``, fp32, bf16 or fp16.
        gamma: ``[H]``, dtype of x or fp32.
        eps: added to the mean square.

    Returns:
        y ``[..., H]`` in the dtype of x, and rstd fp32 ``[..., 1]``.
    """
    columns, x2 = x.shape[-1], as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    arguments = (x2, gamma.contiguous(), y, rstd, x2.shape[0], columns, x2.stride(0), eps, offset)
    if columns > WIDEST_ROW:
        grid = (x2.shape[0],)
        _launch.launch(_forward_tiled, grid, *arguments, BLOCK=_TILE, num_warps=8)
    else:
        rows, block, warps = row_tile(columns)
        grid = (triton.cdiv(x2.shape[0], rows),)
        _launch.launch(_forward, grid, *arguments, ROWS=rows, BLOCK=block, num_warps=warps)
    return y, rstd


def backward(
    dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Return ``(dx, dgamma)``, each with shape and dtype of its tensor.

    Args:
        dy: ``[..., H]``, dtype of x.
        x: ``[..., H]``, fp32, bf16 or fp16.
        gamma: ``[H]``, dtype of x or fp32.
        rstd: fp32 ``[..., 1]``, of :func:`forward`.
    """
    columns, x2, dy2 = x.shape[-1], as_rows(x), as_rows(dy)
    gamma, count = gamma.contiguous(), x2.shape[0]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, block, warps = row_tile(columns, _BACKWARD_TILE)
    most = multiprocessors(x) * _WARPS_PER_MULTIPROCESSOR // warps
    programs = min(triton.cdiv(count, rows), most)
    partial = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
    strides = (dy2.stride(0), x2.stride(0))
    if columns * x.element_size() <= 2 * WIDEST_ROW:  # two rows and dgamma fill the registers
        _launch.launch(
            _backward, (programs,), dy2, x2, gamma, rstd, dx, partial, count, columns, *strides,
            offset, ROWS=rows, BLOCK=block, STAGES=3 if block <= _WIDEST_PIPELINED else 1,
            num_warps=warps,
        )  # fmt: skip
    else:
        _launch.launch(
            _backward_tiled, (count,), dy2, x2, gamma, rstd, dx, columns, *strides, offset,
            BLOCK=_TILE, num_warps=8,
        )  # fmt: skip
        tiles = triton.cdiv(columns, 1024)
        _launch.launch(
            _gamma_tiled, (programs, tiles), dy2, x2, rstd, partial, count, columns, *strides,
            BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return dx, partial.sum(0).to(gamma.dtype)


@triton.jit
def _every_row(vector_ptr, column, columns, ROWS: tl.constexpr):
    """A vector as a tile: from L1 into the registers where the rows' columns are, no exchange."""
    at = column + tl.zeros([ROWS, 1], tl.int32)
    return tl.load(vector_ptr + at, mask=at < columns, other=0.0)


@triton.jit
def _tile(start_ptr, row, column, stride, inside):
    return tl.load(start_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _forward(
    x_ptr, gamma_ptr, y_ptr, rstd_ptr, rows, columns, x_stride, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    exists, inside = row < rows - start, (row < rows - start) & (column < columns)
    x = _tile(x_ptr + start * x_stride, row, column, x_stride, inside)
    gamma = _every_row(gamma_ptr, column, columns, ROWS).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / columns + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + start + row, rstd, mask=exists)
    y = x * rstd * (gamma + tl.cast(offset, tl.float32))
    tl.store(y_ptr + start * columns + row * columns + column, y, mask=inside)


@triton.jit
def _forward_tiled(
    x_ptr, gamma_ptr, y_ptr, rstd_ptr, rows, columns, x_stride, eps, offset, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / columns + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        gamma = tl.load(gamma_ptr + column, mask=inside, other=0.0).to(tl.float32)
        y = x * rstd * (gamma + tl.cast(offset, tl.float32))
        tl.store(y_ptr + row * columns + column, y, mask=inside)


@triton.jit
def _backward(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, dx_ptr, partial_ptr, rows, columns, dy_stride, x_stride,
    offset, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    if STAGES > 1:
        gamma = _every_row(gamma_ptr, column, columns, ROWS)
    dgamma = tl.zeros([ROWS, BLOCK], tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    for number in tl.range(first, rows, step, num_stages=STAGES):
        start = tl.cast(number, tl.int64)
        exists, inside = row < rows - number, column < columns
        if ROWS > 1:
            inside = inside & exists
        x = _tile(x_ptr + start * x_stride, row, column, x_stride, inside)
        dy = _tile(dy_ptr + start * dy_stride, row, column, dy_stride, inside)
        rstd = tl.load(rstd_ptr + start + row, mask=exists, other=0.0)
        normed = x * rstd
        dgamma += dy * normed
        if STAGES == 1:  # read again for every row: it stays in cache, and registers are scarcer
            gamma = _every_row(gamma_ptr, column, columns, ROWS)
        t = dy * (gamma.to(tl.float32) + tl.cast(offset, tl.float32))
        mean = tl.sum(t * normed, 1, keep_dims=True) / columns
        dx = rstd * (t - normed * mean)
        tl.store(dx_ptr + start * columns + row * columns + column, dx, mask=inside)
    out = partial_ptr + tl.program_id(0).to(tl.int64) * columns + column
    tl.store(out, tl.sum(dgamma, 0, keep_dims=True), mask=column < columns)


@triton.jit
def _backward_tiled(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, dx_ptr, columns, dy_stride, x_stride, offset,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        gamma = tl.load(gamma_ptr + column, mask=inside, other=0.0).to(tl.float32)
        products += dy * (gamma + tl.cast(offset, tl.float32)) * x
    mean = tl.sum(products, 0) * rstd / columns
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        gamma = tl.load(gamma_ptr + column, mask=inside, other=0.0).to(tl.float32)
        t = dy * (gamma + tl.cast(offset, tl.float32))
        tl.store(dx_ptr + row * columns + column, rstd * (t - x * rstd * mean), mask=inside)


@triton.jit
def _gamma_tiled(
    dy_ptr, x_ptr, rstd_ptr, partial_ptr, rows, columns, dy_stride, x_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    dgamma = tl.zeros([BLOCK], tl.float32)
    for number in range(first, rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        dgamma += dy * x * tl.load(rstd_ptr + row)
    tl.store(partial_ptr + first.to(tl.int64) * columns + column, dgamma, mask=inside)
