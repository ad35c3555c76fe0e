"""Dequantising frozen weights: a program per tile of the weight, flat.

nf4 reads half a byte, int8 and fp8 one byte a weight, and writes it once; the code book is computed
by a table in memory that stays in the cache.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.quantized_weight import BLOCK, FP8_BLOCK, NF4
from mindspeed.ops.triton import _launch

_TILE = 2048


def dequantize(codes: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """Return the weight ``[out, in]``; see :mod:`mindspeed.ops.quantized_weight`.

    Args:
        codes: nf4 uint8 ``[out, in / 2]``, int8 ``[out, in]``, fp8 uint8 ``[out, in]``.
        scales: fp32, one for each block.
        form: ``nf4``, ``int8`` or ``fp8``.
        dtype: fp32, bf16 or fp16.
    """
    rows, width = codes.shape
    columns = 2 * width if form == "nf4" else width
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    if form == "nf4":
        _launch.launch(
            _nf4, (triton.cdiv(codes.numel(), _TILE),), codes.contiguous(), scales.contiguous(),
            _book(str(codes.device)), out, codes.numel(), BLOCK=_TILE, SHARED=BLOCK, num_warps=4,
        )  # fmt: skip
        return out
    numbers = _numbers(str(codes.device)) if form == "fp8" else scales
    across = scales.shape[1] if form == "fp8" else 1
    grid = (rows, triton.cdiv(columns, _TILE))
    _launch.launch(
        _bytes, grid, codes.contiguous(), scales.contiguous(), numbers, out, columns, across,
        FP8=form == "fp8", BLOCK=_TILE, SHARED=FP8_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@functools.cache
def _book(device: str) -> Tensor:
    return torch.tensor(NF4, dtype=torch.float32, device=device)


@functools.cache
def _numbers(device: str) -> Tensor:
    """The number of each byte of E4M3, which devices before sm_89 cannot read: fp32 ``[256]``."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return every.float().to(device)


@triton.jit
def _nf4(
    codes_ptr, scales_ptr, book_ptr, out_ptr, count,
    BLOCK: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    byte = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + at // (SHARED // 2), mask=inside, other=0.0)
    first = tl.load(book_ptr + (byte >> 4)) * scale
    second = tl.load(book_ptr + (byte & 15)) * scale
    place = tl.program_id(0).to(tl.int64) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    tl.store(out_ptr + place, tl.interleave(first, second), mask=place < 2 * count)


@triton.jit
def _bytes(
    codes_ptr, scales_ptr, numbers_ptr, out_ptr, columns, across,
    FP8: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    code = tl.load(codes_ptr + row * columns + column, mask=inside, other=0)
    if FP8:
        number = tl.load(numbers_ptr + code.to(tl.int32))
        place = (row // SHARED) * across + column // SHARED
        value = number * tl.load(scales_ptr + place, mask=inside, other=0.0)
    else:
        value = code.to(tl.float32) * tl.load(scales_ptr + row) * (1.0 / 127.0)
    tl.store(out_ptr + row * columns + column, value, mask=inside)
