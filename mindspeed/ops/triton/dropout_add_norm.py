"""Dropout, residual and normalisation, forward and backward.

Forward: a program takes a tile of rows, or one row if that is wider. Backward: up to
``_WIDEST_SUMS`` columns a few programs per multiprocessor walk over tiles of rows, the loads of the
next tile under way while one is computed, keep their part of the weight's and the bias's gradient
in registers and write it once; wider rows have a program each that walks over their tiles, and a
second kernel sums the columns (but for the gradient of layerscale, which needs what only the first
one has).
The mask is drawn from ``(seed, offset + position)`` in both directions and never stored. One draw
of the generator serves four columns: with one each, its arithmetic and not memory would set the
pace.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.compat._dropout_add_norm import Operands, Saved
from mindspeed.ops.triton import _launch
from mindspeed.ops.triton._launch import multiprocessors, row_tile

_WIDEST_SUMS = 4096
_FORWARD_TILE, _BACKWARD_TILE, _TILE = 2048, 2048, 2048
_WARPS_PER_MULTIPROCESSOR = 16
_WIDEST_PIPELINED = 2048
"""Wider rows keep enough bytes in flight alone, and the registers for more stages do not exist."""


def forward(*operands: Any) -> tuple[Tensor, ...]:
    """Return ``(out, pre, mean, rstd, mask)`` of :class:`Operands`.

    Returns:
        out ``[..., H]`` in the dtype of x0; pre ``[..., H]`` in the dtype of the residual stream;
        mean and rstd fp32 ``[..., 1]`` (mean is ``[0]`` with ``rms``); mask bool ``[..., H]``, or
        ``[0]`` if not wanted.
    """
    given = Operands(*operands)
    x0, residual, weight, bias, rowscale, layerscale, rng, p, eps, rms, in_fp32, want_mask = given
    columns = x0.shape[-1]
    matrix = x0.contiguous().view(-1, columns)
    pre_dtype = (x0 if residual is None else residual).dtype
    if in_fp32:
        pre_dtype = torch.float32
    out = torch.empty(x0.shape, dtype=x0.dtype, device=x0.device)
    pre = torch.empty(x0.shape, dtype=pre_dtype, device=x0.device)
    rstd = torch.empty((*x0.shape[:-1], 1), dtype=torch.float32, device=x0.device)
    mean = rstd.new_empty(0) if rms else torch.empty_like(rstd)
    mask = x0.new_empty(x0.shape if want_mask else 0, dtype=torch.bool)
    rows, block, warps = row_tile(columns, _FORWARD_TILE)
    seed, offset = _pair(rng)
    _launch.launch(
        _forward, (triton.cdiv(matrix.shape[0], rows),), matrix, _dense(residual),
        weight.contiguous(), _dense(bias), _dense(rowscale), _dense(layerscale),
        out, pre, None if rms else mean, rstd,
        mask if want_mask else None, matrix.shape[0], columns, seed, offset, p, eps,
        DROP=rng is not None, ROWS=rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out, pre, mean, rstd, mask


def backward(*operands: Any) -> tuple[Tensor, ...]:
    """Return ``(dx0, dresidual, dweight, dbias, drowscale, dlayerscale)`` of :class:`Saved`.

    Returns:
        Gradients with the shapes of x0, residual, weight ``[H]``, bias ``[H]``, rowscale and
        layerscale, in the dtypes of dout, pre, weight (twice), rowscale and layerscale; those of
        absent scales are ``[0]``.
    """
    given = Saved(*operands)
    dout, dpre, pre, mean, rstd, weight, rng, x0, rowscale, layerscale, p, rms, separate = given
    columns = pre.shape[-1]
    dout = dout.contiguous()
    count = dout.numel() // columns if columns else 0
    dx0 = torch.empty(pre.shape, dtype=dout.dtype, device=pre.device)
    dresidual = torch.empty_like(pre) if separate else pre.new_empty(0)
    scaled = x0 is not None
    drowscale = torch.empty_like(rowscale) if scaled and rowscale is not None else None
    sum_layer = scaled and layerscale is not None
    rows, block, warps = row_tile(columns, _BACKWARD_TILE)
    most = multiprocessors(pre) * _WARPS_PER_MULTIPROCESSOR // warps
    programs = min(triton.cdiv(count, rows), most)
    kinds = 3 if sum_layer else 2
    partial = torch.empty((kinds, programs, columns), dtype=torch.float32, device=pre.device)
    seed, offset = _pair(rng)
    pre = pre.contiguous()
    arguments = (
        dout, _dense(dpre), pre, None if rms else mean, rstd, weight.contiguous(), _dense(x0),
        _dense(rowscale), _dense(layerscale), dx0, dresidual if separate else None, drowscale,
    )  # fmt: skip
    if columns <= _WIDEST_SUMS or sum_layer:
        _launch.launch(
            _backward, (programs,), *arguments, partial, count, columns, programs, seed, offset, p,
            DROP=rng is not None, LAYER=sum_layer, ROWS=rows, BLOCK=block,
            STAGES=2 if block <= _WIDEST_PIPELINED else 1, num_warps=warps,
        )  # fmt: skip
    else:
        _launch.launch(
            _backward_tiled, (count,), *arguments, columns, seed, offset, p,
            DROP=rng is not None, BLOCK=_TILE, num_warps=8,
        )  # fmt: skip
        _launch.launch(
            _column_sums, (programs, triton.cdiv(columns, 1024)), dout, pre,
            None if rms else mean, rstd, partial, count, columns, programs, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    sums = partial.sum(1)
    empty = pre.new_empty(0)
    dlayerscale = sums[2].to(layerscale.dtype) if sum_layer and layerscale is not None else empty
    return (
        dx0,
        dresidual,
        sums[0].to(weight.dtype),
        sums[1].to(weight.dtype),
        pre.new_empty(0) if drowscale is None else drowscale,
        dlayerscale,
    )


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _pair(rng: Tensor | None) -> tuple[int, int]:
    """Seed and offset as numbers that fit Triton's generator."""
    return (0, 0) if rng is None else (int(rng[0]) & 0x7FFFFFFF, int(rng[1]))


@triton.jit
def _keep_factor(row, columns, seed, offset, p, ROWS: tl.constexpr, BLOCK: tl.constexpr, first):
    """``1 / (1 - p)`` where a value is kept, else 0: columns from ``first`` on, ``[ROWS, BLOCK]``.

    Four columns share a call of the generator; its number is ``offset`` and the place of the four
    among all, a row's last rounded up: never more calls than ``reserve`` counted.
    """
    p = tl.cast(p, tl.float32)
    four = tl.cast(row, tl.int64) * ((columns + 3) // 4) + first // 4 + tl.arange(0, BLOCK // 4)
    # Calls beyond 2^32 continue with another seed.
    low = tl.cast(offset, tl.int64) + four
    high, low = (low >> 32).to(tl.int32), low.to(tl.int32)
    a, b, c, d = tl.randint4x(seed + high, low)
    drawn = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, BLOCK])
    first_kept = tl.minimum(p * 4294967296.0, 4294967040.0).to(tl.uint32)
    return tl.where(drawn.to(tl.uint32, bitcast=True) >= first_kept, 1.0 / (1.0 - p), 0.0)


@triton.jit
def _every_row(vector_ptr, column, inside):
    """A vector for all rows of a tile, from L1 into the registers where the columns are."""
    return tl.load(vector_ptr + column + tl.zeros_like(inside).to(tl.int32), mask=inside, other=0.0)


@triton.jit
def _forward(
    x0_ptr, residual_ptr, weight_ptr, bias_ptr, rowscale_ptr, layerscale_ptr, out_ptr, pre_ptr,
    mean_ptr, rstd_ptr, mask_ptr, rows, columns, seed, offset, p, eps,
    DROP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    exists, inside = row < rows, (row < rows) & (column < columns)
    at = row * columns + column
    h = tl.load(x0_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if rowscale_ptr is not None:
        h *= tl.load(rowscale_ptr + row, mask=exists, other=0.0).to(tl.float32)
    if layerscale_ptr is not None:
        h *= _every_row(layerscale_ptr, column, inside).to(tl.float32)
    if DROP:
        keep = _keep_factor(row, columns, seed, offset, p, ROWS, BLOCK, 0)
        h *= keep
        if mask_ptr is not None:
            tl.store(mask_ptr + at, keep > 0, mask=inside)
    elif mask_ptr is not None:
        tl.store(mask_ptr + at, inside, mask=inside)
    if residual_ptr is not None:
        h += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    rounded = h.to(pre_ptr.dtype.element_ty)
    tl.store(pre_ptr + at, rounded, mask=inside)
    h = rounded.to(tl.float32)
    if mean_ptr is not None:
        mean = tl.sum(h, 1, keep_dims=True) / columns
        tl.store(mean_ptr + row, mean, mask=exists)
        h = tl.where(inside, h - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(h * h, 1, keep_dims=True) / columns + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=exists)
    out = h * rstd * _every_row(weight_ptr, column, inside).to(tl.float32)
    if bias_ptr is not None:
        out += _every_row(bias_ptr, column, inside).to(tl.float32)
    tl.store(out_ptr + at, out, mask=inside)


@triton.jit
def _normed(pre_ptr, mean_ptr, base, at, row, rstd, exists, inside):
    x = tl.load(pre_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
    if mean_ptr is not None:
        x = tl.where(inside, x - tl.load(mean_ptr + row, mask=exists, other=0.0), 0.0)
    return x * rstd


@triton.jit
def _pass_on(
    g, dpre_ptr, x0_ptr, rowscale_ptr, layerscale_ptr, dx0_ptr, dresidual_ptr,
    base, at, row, column, exists, inside, keep, DROP: tl.constexpr,
):  # fmt: skip
    """Write what goes to the residual and to x0; return what the scales' gradients sum."""
    if dpre_ptr is not None:
        g += tl.load(dpre_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
    if dresidual_ptr is not None:
        tl.store(dresidual_ptr + base + at, g, mask=inside)
    if DROP:
        g *= keep
    by_row, by_layer = g, g
    if rowscale_ptr is not None:
        by_layer *= tl.load(rowscale_ptr + row, mask=exists, other=0.0).to(tl.float32)
    dx0 = by_layer
    if layerscale_ptr is not None:
        layerscale = _every_row(layerscale_ptr, column, inside).to(tl.float32)
        dx0 *= layerscale
        by_row *= layerscale
    tl.store(dx0_ptr + base + at, dx0, mask=inside)
    if x0_ptr is not None:
        x0 = tl.load(x0_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
        by_row *= x0
        by_layer *= x0
    return tl.where(inside, by_row, 0.0), tl.where(inside, by_layer, 0.0)


@triton.jit
def _backward(
    dout_ptr, dpre_ptr, pre_ptr, mean_ptr, rstd_ptr, weight_ptr, x0_ptr, rowscale_ptr,
    layerscale_ptr, dx0_ptr, dresidual_ptr, drowscale_ptr, partial_ptr, rows, columns, programs,
    seed, offset, p, DROP: tl.constexpr, LAYER: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    if LAYER:
        dlayer = tl.zeros([ROWS, BLOCK], tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for number in tl.range(first, rows, step, num_stages=STAGES):
        base, row = tl.cast(number, tl.int64) * columns, number + tl.arange(0, ROWS)[:, None]
        exists, inside = row < rows, column < columns
        if ROWS > 1:
            inside = inside & exists
        at = (row - number) * columns + column
        rstd = tl.load(rstd_ptr + row, mask=exists, other=0.0)
        normed = _normed(pre_ptr, mean_ptr, base, at, row, rstd, exists, inside)
        dy = tl.load(dout_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
        dweight += dy * normed
        dbias += dy
        g = dy * _every_row(weight_ptr, column, inside).to(tl.float32)
        correlation = tl.sum(g * normed, 1, keep_dims=True) / columns
        if mean_ptr is not None:
            g -= tl.sum(g, 1, keep_dims=True) / columns
        keep = g
        if DROP:
            keep = _keep_factor(row, columns, seed, offset, p, ROWS, BLOCK, 0)
        by_row, by_layer = _pass_on(
            rstd * (g - normed * correlation), dpre_ptr, x0_ptr, rowscale_ptr, layerscale_ptr,
            dx0_ptr, dresidual_ptr, base, at, row, column, exists, inside, keep, DROP,
        )  # fmt: skip
        if drowscale_ptr is not None:
            tl.store(drowscale_ptr + row, tl.sum(by_row, 1, keep_dims=True), mask=exists)
        if LAYER:
            dlayer += by_layer
    size = tl.cast(programs, tl.int64) * columns
    out = partial_ptr + tl.program_id(0).to(tl.int64) * columns + column
    tl.store(out, tl.sum(dweight, 0, keep_dims=True), mask=column < columns)
    tl.store(out + size, tl.sum(dbias, 0, keep_dims=True), mask=column < columns)
    if LAYER:
        tl.store(out + 2 * size, tl.sum(dlayer, 0, keep_dims=True), mask=column < columns)


@triton.jit
def _backward_tiled(
    dout_ptr, dpre_ptr, pre_ptr, mean_ptr, rstd_ptr, weight_ptr, x0_ptr, rowscale_ptr,
    layerscale_ptr, dx0_ptr, dresidual_ptr, drowscale_ptr, columns, seed, offset, p,
    DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    base, row = tl.program_id(0).to(tl.int64) * columns, tl.program_id(0)
    exists = row >= 0
    rstd = tl.load(rstd_ptr + row)
    total = tl.zeros([1, BLOCK], tl.float32)
    products = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = column < columns
        g = tl.load(dout_ptr + base + column, mask=inside, other=0.0).to(tl.float32)
        g *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        total += g
        products += g * _normed(pre_ptr, mean_ptr, base, column, row, rstd, exists, inside)
    correlation, mean = tl.sum(tl.sum(products, 1), 0) / columns, 0.0
    if mean_ptr is not None:
        mean = tl.sum(tl.sum(total, 1), 0) / columns
    drow = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = column < columns
        g = tl.load(dout_ptr + base + column, mask=inside, other=0.0).to(tl.float32)
        g *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        normed = _normed(pre_ptr, mean_ptr, base, column, row, rstd, exists, inside)
        keep = g
        if DROP:
            keep = _keep_factor(row, columns, seed, offset, p, 1, BLOCK, start)
        by_row, _ = _pass_on(
            rstd * (g - mean - normed * correlation), dpre_ptr, x0_ptr, rowscale_ptr,
            layerscale_ptr, dx0_ptr, dresidual_ptr, base, column, row, column,
            exists, inside, keep, DROP,
        )  # fmt: skip
        drow += by_row
    if drowscale_ptr is not None:
        tl.store(drowscale_ptr + row, tl.sum(tl.sum(drow, 1), 0))


@triton.jit
def _column_sums(
    dout_ptr, pre_ptr, mean_ptr, rstd_ptr, partial_ptr, rows, columns, programs,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * columns + column
        normed = tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if mean_ptr is not None:
            normed -= tl.load(mean_ptr + row)
        dy = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dweight += dy * normed * tl.load(rstd_ptr + row)
        dbias += dy
    out = partial_ptr + first.to(tl.int64) * columns + column
    tl.store(out, dweight, mask=inside)
    tl.store(out + tl.cast(programs, tl.int64) * columns, dbias, mask=inside)
