"""Instruments count what a rank has of a tensor that is divided."""

from __future__ import annotations

from typing import Any


def test_a_divided_tensor_counts_as_the_shard_of_its_rank(ranks) -> None:
    (found,) = ranks(1, figures, backend=None)
    # Three matrices of 8 x 16 on four ranks, fp32, and one of 16 x 4 that all have.
    each, whole = 8 * 16 * 4 // 4, 16 * 4 * 4
    assert found["live"] == 3 * each
    assert found["claimed"] == {"weights": each, "other": 2 * each}
    assert found["tracked"] == 2 * each + whole  # one that was there, and one that was made
    assert found["flops"] == 2 * 2 * 16 * 4  # two rows of the product
    assert found["sent"] == [("all_gather", each)]


def figures() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mindspeed.device import track_memory
    from mindspeed.instruments.flops import FlopCounter
    from mindspeed.instruments.ledger import CommLedger
    from mindspeed.instruments.live_memory import LiveMemory

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = DeviceMesh("cpu", torch.arange(4))
    found: dict[str, Any] = {}
    with LiveMemory() as memory:
        one = DTensor.from_local(torch.ones(2, 16), mesh, [Shard(0)])
        other = torch.zeros_like(one)
        third = one + other
        found["live"] = memory.total
        memory.claim(third, "weights")
        found["claimed"] = {kind: n for kind, n in memory.now.items() if n}
    same = DTensor.from_local(torch.ones(16, 4), mesh, [Replicate()])
    with track_memory(one, same) as tracker:
        fourth = one * 2.0
        found["tracked"] = tracker.current
    _ = fourth @ same  # DTensor tries an operator on FakeTensors of the whole, once
    with FlopCounter() as flops:
        _ = fourth @ same
    found["flops"] = flops.count.total
    with CommLedger() as ledger:
        one.redistribute(mesh, [Replicate()])
    found["sent"] = [(event.op, event.payload) for event in ledger.events]
    return found
