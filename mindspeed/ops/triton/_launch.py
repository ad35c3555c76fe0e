"""How kernels are cut into programs, and started on the device of their tensors."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton

WIDEST_ROW = 16384
"""Columns that one program keeps in registers; wider rows are read tile by tile."""


def row_block(columns: int) -> tuple[int, int]:
    """``(BLOCK, num_warps)`` of a program that holds one row of ``columns`` in registers."""
    block = max(triton.next_power_of_2(columns), 128)
    return block, min(max(block // 512, 4), 16)


def multiprocessors(x: torch.Tensor) -> int:
    """Streaming multiprocessors of ``x``'s device; 4 under the interpreter."""
    if not x.is_cuda:
        return 4
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def launch(
    kernel: Any, grid: tuple[int, ...], first: torch.Tensor, *args: Any, **meta: Any
) -> None:
    """Start ``kernel`` on the device of ``first``, its first argument; an empty grid is no work."""
    if 0 in grid:
        return
    guard = torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext()
    with guard:
        kernel[grid](first, *args, **meta)
