"""Computations in parts: three collectives, two orders, equal to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from mindspeed.errors import ConfigError
from mindspeed.instruments import CommLedger
from mindspeed.tensor_parallel.parts import in_parts

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
M, K, N = 16, 3, 5
PARTS = (1, 2, 4)


def whole(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def job() -> dict[tuple[str, bool, int], tuple[torch.Tensor, int, int]]:
    """Result, calls and bytes of every combination on this rank."""
    x, w = whole(M, K, seed=dist.get_rank()), whole(K, N, seed=9)
    before, found = x.clone(), {}
    for collective, first, parts in itertools.product(COLLECTIVES, (True, False), PARTS):
        with CommLedger() as ledger:
            y = in_parts(x, lambda rows: rows @ w, collective, dist.group.WORLD, parts, first)
        found[collective, first, parts] = y, ledger.calls(collective), ledger.bytes(collective)
    assert torch.equal(x, before)
    with pytest.raises(ConfigError, match="16 rows cannot be divided into 16 parts for each"):
        in_parts(x, torch.neg, "reduce_scatter", dist.group.WORLD, 16)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_both_orders_of_every_collective(ranks, size):
    x, w = [whole(M, K, seed=rank) for rank in range(size)], whole(K, N, seed=9)
    total = torch.stack(x).sum(0) @ w
    for rank, found in enumerate(ranks(size, job)):
        for (collective, first, parts), (y, calls, payload) in found.items():
            expected = {
                "all_reduce": total,
                "all_gather": torch.cat(x) @ w,
                "reduce_scatter": total.chunk(size)[rank],
            }[collective]
            assert torch.equal(y, expected), (collective, first, parts)
            assert (calls, payload) == (parts, M * (N if first else K) * 8)
