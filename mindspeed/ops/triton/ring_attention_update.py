"""Merging two partial attentions: one pass over both outputs.

A row is a token of a head. A program takes some rows: their weights from lane 0 of the statistics,
then a tile of both outputs, each byte read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.triton import _launch

_TILE = 4096


def forward(
    prev: Tensor, prev_max: Tensor, prev_sum: Tensor, cur: Tensor,
    cur_max: Tensor, cur_sum: Tensor, ends: Tensor | None, layout: str
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return merged ``(out, max, sum)``; see :mod:`mindspeed.ops.npu_ring_attention_update`.

    Args:
        prev: ``[S, B, N*D]`` (SBH) or ``[T, N, D]`` (TND); fp32, bf16 or fp16.
        prev_max: fp32 ``[B, N, S, 8]`` or ``[T, N, 8]``.
        prev_sum: same.
        cur: shape of prev; its dtype, or 16 bit where that is fp32.
        cur_max: same as prev_max.
        cur_sum: same as prev_max.
        ends: not read.
        layout: ``"SBH"`` or ``"TND"``.

    Returns:
        Tensors like ``prev``, ``prev_max`` and ``prev_sum``.
    """
    prev, cur = prev.contiguous(), cur.contiguous()
    statistics = [x.contiguous() for x in (prev_max, prev_sum, cur_max, cur_sum)]
    results = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (prev, prev_max, prev_sum)
    ]
    packed = layout == "TND"
    heads, lanes = prev_max.shape[1], prev_max.shape[-1]
    size = prev.shape[-1] if packed else prev.shape[-1] // max(heads, 1)
    rows = prev.numel() // max(size, 1)
    block = max(triton.next_power_of_2(max(size, 1)), 16)
    count = max(_TILE // block, 1)
    _launch.launch(
        _update, (triton.cdiv(rows, count),), prev, statistics[0], statistics[1], cur,
        statistics[2], statistics[3], *results, rows, size, heads, prev.shape[1], prev.shape[0],
        PACKED=packed, LANES=lanes, ROWS=count, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return results[0], results[1], results[2]


@triton.jit
def _update(
    prev_ptr, prev_max_ptr, prev_sum_ptr, cur_ptr, cur_max_ptr, cur_sum_ptr, out_ptr, max_ptr,
    sum_ptr, rows, size, heads, batch, sequence, PACKED: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    at = row
    if not PACKED:  # [s, b, n] of the outputs to [b, n, s] of the statistics
        token = row // heads
        at = ((token % batch) * heads + row % heads) * sequence + token // batch
    prev_max = tl.load(prev_max_ptr + at * LANES, mask=real, other=0.0).to(tl.float32)
    cur_max = tl.load(cur_max_ptr + at * LANES, mask=real, other=0.0).to(tl.float32)
    prev_sum = tl.load(prev_sum_ptr + at * LANES, mask=real, other=1.0).to(tl.float32)
    cur_sum = tl.load(cur_sum_ptr + at * LANES, mask=real, other=1.0).to(tl.float32)
    top = tl.maximum(prev_max, cur_max)
    base = tl.where(top == float("-inf"), 0.0, top)
    prev_share = prev_sum * tl.exp(prev_max - base)
    cur_share = cur_sum * tl.exp(cur_max - base)
    total = prev_share + cur_share
    factor = 1.0 / tl.where(total == 0.0, 1.0, total)
    lane = tl.arange(0, LANES)
    where = at[:, None] * LANES + lane[None, :]
    every = real[:, None] & (lane[None, :] < LANES)
    tl.store(max_ptr + where, tl.broadcast_to(top[:, None], (ROWS, LANES)), mask=every)
    tl.store(sum_ptr + where, tl.broadcast_to(total[:, None], (ROWS, LANES)), mask=every)
    column = tl.arange(0, BLOCK)
    inside = real[:, None] & (column[None, :] < size)
    here = row[:, None] * size + column[None, :]
    prev = tl.load(prev_ptr + here, mask=inside, other=0.0).to(tl.float32)
    cur = tl.load(cur_ptr + here, mask=inside, other=0.0).to(tl.float32)
    out = prev * (prev_share * factor)[:, None] + cur * (cur_share * factor)[:, None]
    tl.store(out_ptr + here, out, mask=inside)
