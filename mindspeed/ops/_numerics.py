"""What all references and samples share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

WORKLOAD_ROWS = 4096
"""Tokens of a realistic workload."""


def accumulation_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype to compute in: fp32 for 16-bit tensors, else the tensor's own."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def random(shape: Sequence[int], dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers on the CPU, the same for every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
