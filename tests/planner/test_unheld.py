"""Collectives that hold no tensor of the program give the same results."""

from __future__ import annotations

from tests.planner.unheld import Unheld


def test_results_are_those_of_the_collectives(ranks) -> None:
    assert ranks(2, collectives) == [
        [[3.0, 3.0], [1.0, 2.0], 3.0, 2.0],
        [[3.0] * 2, [1.0, 2.0], 3.0, 1.0],
    ]


def collectives() -> list[object]:
    """On one of two ranks that begin with rank + 1: sums, gathered, a part of sums, exchanged."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    with Unheld():
        total = torch.full((2, 2), rank + 1.0)[1]
        dist.all_reduce(total)
        gathered = torch.zeros(2)
        dist.all_gather_into_tensor(gathered, torch.full((1,), rank + 1.0))
        part = torch.zeros(1)
        dist.reduce_scatter_tensor(part, torch.full((2,), rank + 1.0))
        received = torch.zeros(1)
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((1,), rank + 1.0), 1 - rank),
                dist.P2POp(dist.irecv, received, 1 - rank),
            ]
        )
        for one in work:
            one.wait()
    return [total.tolist(), gathered.tolist(), part.item(), received.item()]
