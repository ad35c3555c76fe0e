"""Grid sizes of kernels, and their launch on the device of the tensors."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
from torch import Tensor

WIDEST_ROW = 16384
"""Columns that one program keeps in registers; wider rows are read tile by tile."""


TILE = 4096
"""Elements of a tile of rows: 8 KiB in 16 bit, 4 vectors of 16 bytes for each of 128 threads."""


def row_tile(columns: int, elements: int = TILE) -> tuple[int, int, int]:
    """``(ROWS, BLOCK, num_warps)`` of a program that holds whole rows in registers.

    Narrow rows share a program: one row of a head (64 to 256 columns) keeps too few bytes in
    flight to hide the latency of memory. The shape follows from ``columns`` alone, never from a
    timing or from the number of rows, so a row's result repeats bit for bit everywhere.

    Args:
        elements: How many elements a tile of narrow rows should have.
    """
    block = max(triton.next_power_of_2(columns), 16)
    return max(elements // block, 1), block, min(max(block // 512, 4), 16)


def as_rows(x: Tensor) -> Tensor:
    """``x`` as ``[rows, columns]`` with dense columns; a slice of the last dimension stays a view.

    Args:
        x: ``[..., columns]``, any dtype.
    """
    columns = x.shape[-1]
    if x.numel() and x.stride(-1) == 1:
        with contextlib.suppress(RuntimeError):  # view: rows at more than one distance
            return x.view(-1, columns)
    return x.contiguous().view(-1, columns) if x.numel() else x.new_empty(0, columns)


def multiprocessors(x: Tensor) -> int:
    """Return the streaming multiprocessors of the device of ``x``; 4 under the interpreter.

    Args:
        x: a tensor on the device that is asked.
    """
    if not x.is_cuda:
        return 4
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *args: Any, **meta: Any) -> None:
    """Start ``kernel`` on the device of ``first``; an empty grid is no work.

    Args:
        grid: numbers of programs.
        **meta: its compile-time constants.
    """
    if 0 in grid:
        return
    guard = torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext()
    with guard:
        kernel[grid](first, *args, **meta)
