"""``grad[g] += x[g]^T @ dy[g]``: one program per group and tile of the gradient.

A program sums over the rows of its group on the tensor cores, in fp32, then reads, adds and writes
its tile once. Cumulative group sizes are read on the device. No atomics: a tile belongs to one
program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.triton import _launch


def accumulate(x: Tensor, dy: Tensor, ends: Tensor, grad: Tensor) -> None:
    """Add ``x[g]^T @ dy[g]`` to ``grad[g]`` in place; see :mod:`mindspeed.ops.npu_groupmatmul_add`.

    Args:
        x: ``[T, K]``, fp32, bf16 or fp16, rows sorted by group.
        dy: ``[T, N]``, dtype of x.
        ends: int64 ``[E]``, cumulative group sizes, on the device of x.
        grad: fp32 ``[E, K, N]``, contiguous.
    """
    groups, inner, outer = grad.shape
    half = x.dtype.itemsize == 2
    tile, rows, warps = (128, 64, 8) if half else (64, 32, 4)
    grid = (triton.cdiv(inner, tile) * triton.cdiv(outer, tile), groups)
    _launch.launch(
        _accumulate, grid, grad, x.contiguous(), dy.contiguous(), ends, inner, outer,
        ROWS=rows, TILE=tile, WIDEN=x.device.type == "cpu", num_warps=warps,
    )  # fmt: skip


@triton.jit
def _accumulate(
    grad_ptr, x_ptr, dy_ptr, ends_ptr, inner, outer,
    ROWS: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    across = tl.cdiv(outer, TILE)
    k = (tl.program_id(0) // across) * TILE + tl.arange(0, TILE)
    n = (tl.program_id(0) % across) * TILE + tl.arange(0, TILE)
    k_inside, n_inside = k < inner, n < outer
    total = tl.zeros([TILE, TILE], tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        x = tl.load(
            x_ptr + row[:, None] * inner + k[None, :],
            mask=(row < end)[:, None] & k_inside[None, :], other=0.0,
        )  # fmt: skip
        dy = tl.load(
            dy_ptr + row[:, None] * outer + n[None, :],
            mask=(row < end)[:, None] & n_inside[None, :], other=0.0,
        )  # fmt: skip
        if WIDEN:  # the interpreter, on CPU tensors, cannot multiply bf16
            x, dy = x.to(tl.float32), dy.to(tl.float32)
        # "ieee": fp32 operands are not truncated to tf32; 16-bit ones are exact either way.
        total = tl.dot(tl.trans(x), dy, total, input_precision="ieee")
    if end > start:
        at = (group.to(tl.int64) * inner + k[:, None]) * outer + n[None, :]
        inside = k_inside[:, None] & n_inside[None, :]
        before = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_ptr + at, before + total, mask=inside)
