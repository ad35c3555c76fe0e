"""Blocks of rows, and the sums of gradients of keys and values."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from mindspeed.moe.ampipe.rows import ContextRows, Prefixes, blocks


@pytest.mark.parametrize(("chunks", "ranks"), [(1, 1), (2, 1), (1, 4), (4, 2), (2, 8)])
def test_every_rank_gets_its_own_rows(chunks, ranks):
    """A chunk's r-th block is the next part of rank r's rows; scores are those of the formula."""
    length = 64
    found = blocks(length, chunks, ranks)
    for rank in range(ranks):
        own = [row for chunk in found for row in range(*chunk[rank])]
        assert own == list(range(rank * length // ranks, (rank + 1) * length // ranks))
    scores = sum((end - start) * end for chunk in found for start, end in chunk)
    parts = chunks * ranks
    assert scores == length**2 * (parts + 1) // (2 * parts)


@pytest.mark.parametrize("length", [0, 2, 9])
def test_uneven_rows_are_refused(length):
    with pytest.raises(ValueError, match=f"{length} rows cannot be cut into 2 chunks on 2"):
        blocks(length, 2, 2)


def test_gradients_of_prefixes():
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    prefixes = Prefixes(x * 1.0)
    sum((prefixes.first(n) ** 2).sum() * n for n in (2, 4, 6)).backward()
    weight = torch.tensor([12.0, 12, 10, 10, 6, 6], dtype=torch.float64)
    torch.testing.assert_close(x.grad, 2 * x.detach() * weight[:, None])


def test_gradients_of_prefixes_are_summed_in_fp32():
    """256 + 1 is 256 in bf16: ones that come after 256 would be lost."""
    x = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    prefixes = Prefixes(x.clone())
    total = sum(prefixes.first(1).float().sum() for _ in range(64))
    total = total + (prefixes.first(2).float() * 256).sum()  # the last is the first in backward
    total.backward()
    assert x.grad.tolist() == [320.0, 256.0]


def test_nothing_is_kept_alive():
    x = torch.zeros(2, requires_grad=True).clone()
    kept = weakref.ref(x)
    gc.disable()
    try:
        prefixes = Prefixes(x)
        (prefixes.first(1).sum() + prefixes.first(2).sum()).backward()
        del prefixes, x
        assert kept() is None
    finally:
        gc.enable()


def test_without_gradients_prefixes_are_views():
    x = torch.ones(3)
    assert Prefixes(x).first(2).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ends_of_blocks_among_context_parallel_ranks(size):
    """Each rank's rows are two chunks of the zigzag; a block ends where its last row is."""
    rows = 16
    half = rows // 2
    for rank in range(size):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
        places = [*range(rank * half, (rank + 1) * half)]
        places += range((2 * size - 1 - rank) * half, (2 * size - rank) * half)
        for chunk in blocks(rows, 4, 1):
            for _, end in chunk:
                assert ContextRows(group).end(end, rows) == places[end - 1] + 1
