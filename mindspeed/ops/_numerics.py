"""Accumulation dtypes, random samples and row blocks of reference implementations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

WORKLOAD_ROWS = 4096
"""Tokens of a realistic workload."""

_BLOCK_ELEMENTS = 1 << 18
"""1 MiB of fp32: about a core's own cache; smaller parts spend their time on calls."""


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in for ``x``: fp32, or fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def random(shape: Sequence[int], dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """Normally distributed numbers ``[*shape]`` in ``dtype`` on the CPU.

    They are the same for every dtype, up to rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def product_flops(x: Sequence[int], w: Sequence[int], *unused: Any, **more: Any) -> int:
    """Operations of a product: two for every element of the left side and column of the right."""
    return 2 * math.prod(x) * w[-1]


def row_blocks(x: Tensor) -> Iterator[slice]:
    """Yield slices of the first dimension whose intermediate results fit the CPU's cache.

    A formula of several steps that runs slice by slice reads and writes main memory once;
    ``x [rows, ...]`` is its largest tensor. A compiler that fuses steps gets everything at once.
    """
    if torch.compiler.is_compiling() or not x.is_cpu:
        yield slice(None)
        return
    rows = x.shape[0]
    count = max(1, _BLOCK_ELEMENTS * rows // max(x.numel(), 1))
    for start in range(0, rows, count):
        yield slice(start, start + count)


def store(out: Tensor, function: Callable[..., Tensor], *args: Any, **more: Any) -> None:
    """``out = function(*args, **more)``, without an intermediate copy where that is possible.

    Args:
        out: written elementwise; its dtype rounds.
        function: takes ``out=``; the dtype of its result is that of its first argument.
    """
    if out.dtype == args[0].dtype and not torch.compiler.is_compiling():
        function(*args, **more, out=out)
    else:  # Dynamo refuses an `out` that is not contiguous, and a cast needs the copy anyway.
        out.copy_(function(*args, **more))
