"""RMSNorm forward and backward.

Forward: a program per row, 4 bytes per element moved in 16 bit. Backward: a few programs per
multiprocessor walk over the rows, keep their part of dgamma in registers and write it once; one
sum over the programs follows. 6 bytes per element. Rows wider than ``WIDEST_ROW`` are read twice,
tile by tile (the second time from cache), and dgamma is reduced by a kernel of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mindspeed.ops.triton import _launch
from mindspeed.ops.triton._launch import WIDEST_ROW, multiprocessors, row_block

_TILE = 4096
_PROGRAMS_PER_MULTIPROCESSOR = 2


def forward(
    x: torch.Tensor, gamma: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(y, rstd)``; see :mod:`mindspeed.ops.rms_norm`."""
    columns = x.shape[-1]
    rows = x.contiguous().view(-1, columns)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    wide = columns > WIDEST_ROW
    block, warps = (_TILE, 8) if wide else row_block(columns)
    kernel = _forward_tiled if wide else _forward
    _launch.launch(
        kernel, (rows.shape[0],), rows, gamma.contiguous(), y, rstd, columns, eps, offset,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y, rstd


def backward(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(dx, dgamma)``."""
    columns = x.shape[-1]
    x2, dy2 = x.contiguous().view(-1, columns), dy.contiguous().view(-1, columns)
    gamma = gamma.contiguous()
    rows = x2.shape[0]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    programs = min(rows, _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x))
    partial = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
    if columns <= WIDEST_ROW:
        block, warps = row_block(columns)
        _launch.launch(
            _backward, (programs,), dy2, x2, gamma, rstd, dx, partial, rows, columns, offset,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
    else:
        _launch.launch(
            _backward_tiled, (rows,), dy2, x2, gamma, rstd, dx, columns, offset,
            BLOCK=_TILE, num_warps=8,
        )  # fmt: skip
        tiles = triton.cdiv(columns, 1024)
        _launch.launch(
            _gamma_tiled, (programs, tiles), dy2, x2, rstd, partial, rows, columns,
            BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return dx, partial.sum(0).to(gamma.dtype)


@triton.jit
def _forward(x_ptr, gamma_ptr, y_ptr, rstd_ptr, columns, eps, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    gamma = tl.load(gamma_ptr + column, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / columns + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd * (gamma + tl.cast(offset, tl.float32))
    tl.store(y_ptr + row * columns + column, y, mask=inside)


@triton.jit
def _forward_tiled(x_ptr, gamma_ptr, y_ptr, rstd_ptr, columns, eps, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / columns + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        gamma = tl.load(gamma_ptr + column, mask=inside, other=0.0).to(tl.float32)
        y = x * rstd * (gamma + tl.cast(offset, tl.float32))
        tl.store(y_ptr + row * columns + column, y, mask=inside)


@triton.jit
def _backward(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, dx_ptr, partial_ptr, rows, columns, offset,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    dgamma = tl.zeros([BLOCK], tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * columns + column
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        # Read again for every row: it stays in cache, and registers are scarcer.
        gamma = tl.load(gamma_ptr + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normed = x * rstd
        dgamma += dy * normed
        t = dy * (gamma + tl.cast(offset, tl.float32))
        mean = tl.sum(t * normed, 0) / columns
        tl.store(dx_ptr + at, rstd * (t - normed * mean), mask=inside)
    tl.store(partial_ptr + first.to(tl.int64) * columns + column, dgamma, mask=inside)


@triton.jit
def _backward_tiled(
    dy_ptr, x_ptr, gamma_ptr, rstd_ptr, dx_ptr, columns, offset, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        at = row * columns + column
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        gamma = tl.load(gamma_ptr + column, mask=inside, other=0.0).to(tl.float32)
        products += dy * (gamma + tl.cast(offset, tl.float32)) * x
    mean = tl.sum(products, 0) * rstd / columns
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        at = row * columns + column
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        gamma = tl.load(gamma_ptr + column, mask=inside, other=0.0).to(tl.float32)
        t = dy * (gamma + tl.cast(offset, tl.float32))
        tl.store(dx_ptr + at, rstd * (t - x * rstd * mean), mask=inside)


@triton.jit
def _gamma_tiled(
    dy_ptr, x_ptr, rstd_ptr, partial_ptr, rows, columns, BLOCK: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    dgamma = tl.zeros([BLOCK], tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * columns + column
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dgamma += dy * x * tl.load(rstd_ptr + row)
    tl.store(partial_ptr + first.to(tl.int64) * columns + column, dgamma, mask=inside)
