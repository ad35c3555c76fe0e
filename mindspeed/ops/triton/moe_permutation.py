"""Moving rows by a map ``rows [T, W]``: scatter, gather-sum, and the gradient of the weighted sum.

A program holds a block of tokens times a block of columns and walks over the copies of its tokens
until none of them has another: a row of the token side is read or written once, whatever W is. Sums
run in the order of the copies, in fp32. Up to four copies are read at a time: one by one, each
would wait for the number of its row and then for the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.triton import _launch

_TILE = 8192
"""Elements of a program's block."""

_SUM_TILE = 2048
"""The same where up to four copies of the block are read at a time."""

_AT_ONCE = 4


def permute(tokens: Tensor, rows: Tensor, num_rows: int, padded: bool) -> Tensor:
    """Copy tokens to the rows of their copies; see :mod:`mindspeed.ops.moe_permutation`.

    Args:
        tokens: ``[T, H]``, floating dtype.
        rows: int32 ``[T, W]``, the row of each copy.
        padded: rows may have no source; they are filled with zeros.

    Returns:
        ``[num_rows, H]`` in the dtype of ``tokens``.
    """
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


def unpermute(permuted: Tensor, rows: Tensor, probs: Tensor | None, padded: bool) -> Tensor:
    """Return ``[T, H]`` in the dtype of ``permuted``: the weighted sum of each token's copies.

    Args:
        permuted: ``[num_rows, H]``, floating dtype.
        rows: int32 ``[T, W]``, the row of each copy.
        probs: ``[T, W]``, floating dtype; None sums unweighted.
        padded: without effect here.
    """
    count, width = rows.shape
    num_rows, columns = permuted.shape
    out = permuted.new_empty(count, columns)
    block, across = _blocks(columns, _SUM_TILE)
    grid = (triton.cdiv(count, block), triton.cdiv(columns, across))
    _launch.launch(
        _unpermute, grid, out, permuted.contiguous(), rows.contiguous(),
        None if probs is None else probs.contiguous(), count, columns, width, num_rows,
        BLOCK=block, COLUMNS=across, COPIES=_copies(width), num_warps=4,
    )  # fmt: skip
    return out


def unpermute_backward(
    dy: Tensor, permuted: Tensor, rows: Tensor, probs: Tensor, padded: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``permuted`` and of ``probs``, each with its shape and dtype.

    Args:
        dy: ``[T, H]``, dtype of permuted.
        permuted: ``[num_rows, H]``, floating dtype.
        rows: int32 ``[T, W]``, the row of each copy.
        probs: ``[T, W]``, floating dtype.
        padded: rows may belong to no token; their gradient is zero.
    """
    count, width = rows.shape
    num_rows, columns = permuted.shape
    dprobs = probs.new_zeros(probs.shape)
    if not rows.numel():
        return permuted.new_zeros(num_rows, columns), dprobs
    dpermuted = permuted.new_empty(num_rows, columns)
    across = min(triton.next_power_of_2(columns), 1024)
    block = max(_SUM_TILE // across, 1)
    grid = (triton.cdiv(count, block),)
    _launch.launch(
        _unpermute_backward, grid, dpermuted, dprobs, dy.contiguous(), permuted.contiguous(),
        rows.contiguous(), probs.contiguous(), _filled(rows, padded),
        count, columns, width, num_rows,
        PADDED=padded, BLOCK=block, COLUMNS=across, COPIES=min(_copies(width), 2), num_warps=4,
    )  # fmt: skip
    return dpermuted, dprobs


def _blocks(columns: int, tile: int = _TILE) -> tuple[int, int]:
    across = min(triton.next_power_of_2(columns), 1024)
    return min(tile // across, 512), across


def _copies(width: int) -> int:
    """Copies of a token that are read at a time: of three, four with one that does not exist."""
    return min(triton.next_power_of_2(width), _AT_ONCE)


def _filled(rows: Tensor, padded: bool) -> Tensor | None:
    """Number of rows that have a source, int scalar on the device; None if all have one."""
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
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists, inside = token < count, column < columns
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    slot = tl.zeros([BLOCK], tl.int32)
    first = tl.load(rows_ptr + token * width, mask=exists, other=-1)
    while tl.max(first, 0) >= 0:
        for copy in tl.static_range(COPIES):
            here = exists & (slot + copy < width)
            at = token * width + slot + copy
            row = first if copy == 0 else tl.load(rows_ptr + at, mask=here, other=-1)
            kept = (row >= 0) & (row < num_rows)
            source = row.to(tl.int64)[:, None] * columns + column[None, :]
            x = tl.load(permuted_ptr + source, mask=kept[:, None] & inside[None, :], other=0.0)
            x = x.to(tl.float32)
            if probs_ptr is not None:
                weight = tl.load(probs_ptr + at, mask=kept, other=0.0)
                x = x * weight.to(tl.float32)[:, None]
            total += x
        slot += COPIES
        first = tl.load(rows_ptr + token * width + slot, mask=exists & (slot < width), other=-1)
    at = token.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_ptr + at, total, mask=exists[:, None] & inside[None, :])


@triton.jit
def _unpermute_backward(
    dpermuted_ptr, dprobs_ptr, dy_ptr, permuted_ptr, rows_ptr, probs_ptr, filled_ptr,
    count, columns, width, num_rows,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = token < count
    at = token.to(tl.int64)[:, None] * columns
    slot = tl.zeros([BLOCK], tl.int32)
    row = tl.load(rows_ptr + token * width, mask=exists, other=-1)
    while tl.max(row, 0) >= 0:
        place = token * width + slot
        kept, products, weight = _copy(row, probs_ptr, place, num_rows, BLOCK, COLUMNS)
        to = row.to(tl.int64)[:, None] * columns
        if COPIES > 1:
            row2 = tl.load(rows_ptr + place + 1, mask=exists & (slot + 1 < width), other=-1)
            kept2, products2, weight2 = _copy(row2, probs_ptr, place + 1, num_rows, BLOCK, COLUMNS)
            to2 = row2.to(tl.int64)[:, None] * columns
        # dy is read once for both copies; a sum over the columns waits for all of them.
        for start in range(0, columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = (column < columns)[None, :]
            wanted = exists[:, None] & inside
            dy = tl.load(dy_ptr + at + column[None, :], mask=wanted, other=0.0).to(tl.float32)
            wanted = kept[:, None] & inside
            x = tl.load(permuted_ptr + to + column[None, :], mask=wanted, other=0.0)
            if COPIES > 1:
                wanted2 = kept2[:, None] & inside
                x2 = tl.load(permuted_ptr + to2 + column[None, :], mask=wanted2, other=0.0)
                products2 += dy * x2.to(tl.float32)
                tl.store(dpermuted_ptr + to2 + column[None, :], dy * weight2, mask=wanted2)
            products += dy * x.to(tl.float32)
            tl.store(dpermuted_ptr + to + column[None, :], dy * weight, mask=wanted)
        tl.store(dprobs_ptr + place, tl.sum(products, 1), mask=kept)
        if COPIES > 1:
            tl.store(dprobs_ptr + place + 1, tl.sum(products2, 1), mask=kept2)
        slot += COPIES
        row = tl.load(rows_ptr + token * width + slot, mask=exists & (slot < width), other=-1)
    if PADDED:
        for empty in range(tl.load(filled_ptr) + tl.program_id(0), num_rows, tl.num_programs(0)):
            for start in range(0, columns, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                zero = tl.zeros([COLUMNS], dpermuted_ptr.dtype.element_ty)
                there = tl.cast(empty, tl.int64) * columns + column
                tl.store(dpermuted_ptr + there, zero, mask=column < columns)


@triton.jit
def _copy(row, probs_ptr, place, num_rows, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Tokens that have a copy in ``row``, a place for its products, and its weights."""
    kept = (row >= 0) & (row < num_rows)
    weight = tl.load(probs_ptr + place, mask=kept, other=0.0).to(tl.float32)[:, None]
    return kept, tl.zeros([BLOCK, COLUMNS], tl.float32), weight
