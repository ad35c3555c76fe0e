"""Moving rows by a map ``rows [T, W]``: scatter, gather-sum, and the gradient of the weighted sum.

A program holds a block of tokens times a block of columns and walks over the copies of its tokens
until none of them has another: a row of the token side is read or written once, whatever W is. Sums
run in the order of the copies, in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mindspeed.ops.triton import _launch

_TILE = 8192
"""Elements of a program's block."""


def permute(tokens: torch.Tensor, rows: torch.Tensor, num_rows: int, padded: bool) -> torch.Tensor:
    """Return ``[num_rows, H]``; see :mod:`mindspeed.ops.moe_permutation`."""
    count, columns = tokens.shape
    if not rows.numel():
        return tokens.new_zeros(num_rows, columns)
    out = tokens.new_empty(num_rows, columns)
    block, across = _blocks(columns)
    grid = (triton.cdiv(count, block), triton.cdiv(columns, across))
    _launch.launch(
        _permute, grid, out, tokens.contiguous(), rows.contiguous(), _filled(rows, padded),
        count, columns, rows.shape[1], num_rows,
        PADDED=padded, BLOCK=block, COLUMNS=across, num_warps=8,
    )  # fmt: skip
    return out


def unpermute(
    permuted: torch.Tensor, rows: torch.Tensor, probs: torch.Tensor | None, padded: bool
) -> torch.Tensor:
    """Return ``[T, H]``."""
    count, width = rows.shape
    num_rows, columns = permuted.shape
    out = permuted.new_empty(count, columns)
    block, across = _blocks(columns)
    grid = (triton.cdiv(count, block), triton.cdiv(columns, across))
    _launch.launch(
        _unpermute, grid, out, permuted.contiguous(), rows.contiguous(),
        None if probs is None else probs.contiguous(), count, columns, width, num_rows,
        BLOCK=block, COLUMNS=across, num_warps=8,
    )  # fmt: skip
    return out


def unpermute_backward(
    dy: torch.Tensor, permuted: torch.Tensor, rows: torch.Tensor, probs: torch.Tensor, padded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``permuted`` and of ``probs``."""
    count, width = rows.shape
    num_rows, columns = permuted.shape
    dprobs = probs.new_zeros(probs.shape)
    if not rows.numel():
        return permuted.new_zeros(num_rows, columns), dprobs
    dpermuted = permuted.new_empty(num_rows, columns)
    across = min(triton.next_power_of_2(columns), 1024)
    block = 4
    grid = (triton.cdiv(count, block),)
    _launch.launch(
        _unpermute_backward, grid, dpermuted, dprobs, dy.contiguous(), permuted.contiguous(),
        rows.contiguous(), probs.contiguous(), _filled(rows, padded),
        count, columns, width, num_rows,
        PADDED=padded, BLOCK=block, COLUMNS=across, num_warps=4,
    )  # fmt: skip
    return dpermuted, dprobs


def _blocks(columns: int) -> tuple[int, int]:
    across = min(triton.next_power_of_2(columns), 1024)
    return min(_TILE // across, 512), across


def _filled(rows: torch.Tensor, padded: bool) -> torch.Tensor | None:
    """How many rows somebody goes to, on the device; None where all are."""
    return (rows >= 0).sum(dtype=torch.int32) if padded else None


@triton.jit
def _permute(
    out_ptr, tokens_ptr, rows_ptr, filled_ptr, count, columns, width, num_rows,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists, inside = token < count, column < columns
    at = token.to(tl.int64)[:, None] * columns + column[None, :]
    x = tl.load(tokens_ptr + at, mask=exists[:, None] & inside[None, :], other=0.0)
    slot = tl.zeros([BLOCK], tl.int32)
    row = tl.load(rows_ptr + token * width, mask=exists, other=-1)
    while tl.max(row, 0) >= 0:
        kept = (row >= 0) & (row < num_rows)
        to = row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(out_ptr + to, x, mask=kept[:, None] & inside[None, :])
        slot += 1
        row = tl.load(rows_ptr + token * width + slot, mask=exists & (slot < width), other=-1)
    if PADDED:
        zero = tl.zeros([COLUMNS], out_ptr.dtype.element_ty)
        for empty in range(tl.load(filled_ptr) + tl.program_id(0), num_rows, tl.num_programs(0)):
            tl.store(out_ptr + tl.cast(empty, tl.int64) * columns + column, zero, mask=inside)


@triton.jit
def _unpermute(
    out_ptr, permuted_ptr, rows_ptr, probs_ptr, count, columns, width, num_rows,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists, inside = token < count, column < columns
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    slot = tl.zeros([BLOCK], tl.int32)
    row = tl.load(rows_ptr + token * width, mask=exists, other=-1)
    while tl.max(row, 0) >= 0:
        kept = (row >= 0) & (row < num_rows)
        source = row.to(tl.int64)[:, None] * columns + column[None, :]
        x = tl.load(permuted_ptr + source, mask=kept[:, None] & inside[None, :], other=0.0)
        x = x.to(tl.float32)
        if probs_ptr is not None:
            weight = tl.load(probs_ptr + token * width + slot, mask=kept, other=0.0)
            x = x * weight.to(tl.float32)[:, None]
        total += x
        slot += 1
        row = tl.load(rows_ptr + token * width + slot, mask=exists & (slot < width), other=-1)
    at = token.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_ptr + at, total, mask=exists[:, None] & inside[None, :])


@triton.jit
def _unpermute_backward(
    dpermuted_ptr, dprobs_ptr, dy_ptr, permuted_ptr, rows_ptr, probs_ptr, filled_ptr,
    count, columns, width, num_rows,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = token < count
    at = token.to(tl.int64)[:, None] * columns
    slot = tl.zeros([BLOCK], tl.int32)
    row = tl.load(rows_ptr + token * width, mask=exists, other=-1)
    while tl.max(row, 0) >= 0:
        kept = (row >= 0) & (row < num_rows)
        to = row.to(tl.int64)[:, None] * columns
        weight = tl.load(probs_ptr + token * width + slot, mask=kept, other=0.0).to(tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        # dy is read again for every copy: the few rows of a program stay in cache.
        for first in range(0, columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            wanted = kept[:, None] & (column < columns)[None, :]
            dy = tl.load(dy_ptr + at + column[None, :], mask=wanted, other=0.0).to(tl.float32)
            x = tl.load(permuted_ptr + to + column[None, :], mask=wanted, other=0.0)
            products += tl.sum(dy * x.to(tl.float32), 1)
            tl.store(dpermuted_ptr + to + column[None, :], dy * weight[:, None], mask=wanted)
        tl.store(dprobs_ptr + token * width + slot, products, mask=kept)
        slot += 1
        row = tl.load(rows_ptr + token * width + slot, mask=exists & (slot < width), other=-1)
    if PADDED:
        for empty in range(tl.load(filled_ptr) + tl.program_id(0), num_rows, tl.num_programs(0)):
            for first in range(0, columns, COLUMNS):
                column = first + tl.arange(0, COLUMNS)
                zero = tl.zeros([COLUMNS], dpermuted_ptr.dtype.element_ty)
                place = tl.cast(empty, tl.int64) * columns + column
                tl.store(dpermuted_ptr + place, zero, mask=column < columns)
