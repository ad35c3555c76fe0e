"""Uneven all-gather and reduce-scatter, which NCCL supports and plain gloo refuses."""

from __future__ import annotations

import pytest
import torch

from tests.device import uneven_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_uneven_parts_are_gathered_and_reduced(ranks, size, dtype):
    results = ranks(size, uneven_ranks.gather_and_scatter_uneven_parts, dtype)
    rows = [float(rank) for rank in range(size) for _ in range(rank + 1)]
    for rank, (gathered, summed, averaged) in enumerate(results):
        assert gathered[:, 0].tolist() == rows
        assert gathered.dtype == dtype
        assert summed.unique().item() == size * rank + sum(range(size))
        assert averaged.unique().item() == rank
        assert summed.shape == averaged.shape == (rank + 1, 3)
