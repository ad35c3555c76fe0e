"""What all references and samples share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

WORKLOAD_ROWS = 4096
"""Tokens of a realistic workload."""

_BLOCK_ELEMENTS = 1 << 17
"""512 KiB of fp32: a few of them fit in a core's cache."""


def accumulation_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype to compute in: fp32 for 16-bit tensors, else the tensor's own."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def random(shape: Sequence[int], dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers on the CPU, the same for every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def row_blocks(rows: torch.Tensor) -> Iterator[slice]:
    """Cut a matrix into groups of rows whose intermediate results stay in the CPU's cache.

    A formula of several steps that runs block by block reads and writes main memory once. A
    compiler that fuses the steps itself gets everything at once.

    Args:
        rows: ``[rows, columns]``.
    """
    if torch.compiler.is_compiling() or not rows.is_cpu:
        yield slice(None)
        return
    count = max(1, _BLOCK_ELEMENTS // max(rows.shape[1], 1))
    for start in range(0, rows.shape[0], count):
        yield slice(start, start + count)
