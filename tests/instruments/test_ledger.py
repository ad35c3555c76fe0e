"""The ledger's bytes equal hand counts for every collective, however it is called."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.utils.checkpoint import checkpoint

from mindspeed.instruments import CommLedger

N = 12  # elements of the tensor t of every case; fp32, so t = 48 bytes
T = 4 * N


def split(p: int) -> list[torch.Tensor]:
    return list(torch.ones(N).chunk(p))


CALLS = {
    "all_reduce": lambda p: dist.all_reduce(torch.ones(N)),
    "all_reduce async": lambda p: dist.all_reduce(torch.ones(N), async_op=True).wait(),
    "all_reduce coalesced": lambda p: dist.all_reduce_coalesced([torch.ones(5), torch.ones(7)]),
    "all_gather": lambda p: dist.all_gather([torch.empty(N) for _ in range(p)], torch.ones(N)),
    "all_gather tensor": lambda p: dist.all_gather_into_tensor(torch.empty(p * N), torch.ones(N)),
    "reduce_scatter": lambda p: dist.reduce_scatter(torch.empty(N // p), split(p)),
    "reduce_scatter tensor": lambda p: dist.reduce_scatter_tensor(
        torch.empty(N // p), torch.ones(N)
    ),
    "all_to_all": lambda p: dist.all_to_all(list(torch.empty(N).chunk(p)), split(p)),
    "all_to_all single": lambda p: dist.all_to_all_single(torch.empty(N), torch.ones(N)),
    "broadcast": lambda p: dist.broadcast(torch.ones(N), src=0),
    "reduce": lambda p: dist.reduce(torch.ones(N), dst=0),
    "gather": lambda p: dist.gather(
        torch.ones(N), [torch.empty(N) for _ in range(p)] if dist.get_rank() == 0 else None
    ),
    "scatter": lambda p: dist.scatter(
        torch.empty(N), [torch.ones(N) for _ in range(p)] if dist.get_rank() == 0 else None
    ),
    "barrier": lambda p: dist.barrier(),
    "all_reduce functional": lambda p: funcol.all_reduce(torch.ones(N), "sum", dist.group.WORLD),
    "all_gather functional": lambda p: funcol.all_gather_tensor(torch.ones(N), 0, dist.group.WORLD),
    "reduce_scatter functional": lambda p: funcol.reduce_scatter_tensor(
        torch.ones(N), "sum", 0, dist.group.WORLD
    ),
    "all_to_all functional": lambda p: funcol.all_to_all_single(
        torch.ones(N), None, None, dist.group.WORLD
    ),
    "all_reduce functional with gradient": lambda p: funcol.all_gather_tensor_autograd(
        torch.ones(N, requires_grad=True), 0, dist.group.WORLD
    ),
}

# operation, payload and the bytes one rank sends, for p ranks: written out by hand
HAND = {
    2: {
        "all_reduce": (48, 48),
        "all_gather": (48, 48),
        "reduce_scatter": (48, 24),
        "all_to_all": (48, 24),
        "broadcast": (48, 24),
        "reduce": (48, 24),
        "gather": (48, 24),
        "scatter": (48, 24),
        "barrier": (0, 0),
    },
    4: {
        "all_reduce": (48, 72),
        "all_gather": (48, 144),
        "reduce_scatter": (48, 36),
        "all_to_all": (48, 36),
        "broadcast": (48, 36),
        "reduce": (48, 36),
        "gather": (48, 36),
        "scatter": (48, 36),
        "barrier": (0, 0),
    },
}


def run_every_call() -> dict[str, list[tuple[str, int, int]]]:
    found = {}
    for name, call in CALLS.items():
        with CommLedger() as ledger:
            result = call(dist.get_world_size())
            if "functional" in name:
                result + 1  # waits
        found[name] = [(event.op, event.payload, event.wire) for event in ledger.events]
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_collective_counts_its_expected_bytes(ranks, world_size):
    for found in ranks(world_size, run_every_call):
        for name, events in found.items():
            op = "all_gather" if "with gradient" in name else name.split()[0]
            assert events == [(op, *HAND[world_size][op])], name


def ring_of_sends() -> list[tuple[str, int, int]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    with CommLedger() as ledger:
        ops = [
            dist.P2POp(dist.isend, torch.ones(N), (rank + 1) % size),
            dist.P2POp(dist.irecv, torch.empty(2, N // 2), (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if rank == 0:
            dist.send(torch.ones(N, dtype=torch.bfloat16), dst=1)
        if rank == 1:
            dist.recv(torch.ones(N, dtype=torch.bfloat16))
    return [(event.op, event.payload, event.wire) for event in ledger.events]


def test_sends_and_receives_count_once_on_each_side(ranks):
    ring = [("send", 48, 48), ("recv", 48, 0)]
    first, second, third = ranks(3, ring_of_sends)
    assert first == [*ring, ("send", 24, 24)]
    assert second == [*ring, ("recv", 24, 0)]
    assert third == ring


def uneven_all_to_all() -> tuple[int, int]:
    sends = [[1, 3], [2, 0]][dist.get_rank()]
    receives = [[1, 2], [3, 0]][dist.get_rank()]
    with CommLedger() as ledger:
        output = torch.empty(sum(receives), 5)
        dist.all_to_all_single(output, torch.ones(sum(sends), 5), receives, sends)
    return ledger.bytes("all_to_all"), ledger.wire_bytes("all_to_all")


def test_uneven_all_to_all_counts_what_leaves_the_rank(ranks):
    assert ranks(2, uneven_all_to_all) == [(4 * 5 * 4, 3 * 5 * 4), (2 * 5 * 4, 2 * 5 * 4)]


class Reduce(torch.autograd.Function):
    """All-reduce in forward and in backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def phases(reentrant: bool) -> dict[str, int]:
    x = torch.ones(N, requires_grad=True)
    with CommLedger() as ledger:
        y = checkpoint(lambda t: Reduce.apply(t).sin(), x, use_reentrant=reentrant)
        y.sum().backward()
    return {
        phase: ledger.bytes("all_reduce", phase=phase)
        for phase in ("forward", "recompute", "backward")
    }


@pytest.mark.parametrize("reentrant", [True, False])
def test_forward_recompute_and_backward_are_distinguished(ranks, reentrant):
    expected = {"forward": T, "recompute": T, "backward": T}
    assert ranks(2, phases, reentrant) == [expected, expected]


def checkpointed_exchange(megatron: bool) -> dict[str, int]:
    """The backward of Megatron's all-to-all calls the forward of the same autograd function."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)

    def exchange(x: torch.Tensor) -> torch.Tensor:
        return tensor_parallel.all_to_all(dist.group.WORLD, x).sin()

    x = torch.ones(N, requires_grad=True)
    with CommLedger() as ledger:
        if megatron:
            y = tensor_parallel.checkpoint(exchange, False, x)
        else:
            y = checkpoint(exchange, x, use_reentrant=False)
        y.sum().backward()
    return {
        phase: ledger.calls("all_to_all", phase=phase)
        for phase in ("forward", "recompute", "backward")
    }


@pytest.mark.parametrize("megatron", [True, False], ids=["megatron", "torch"])
def test_communication_in_a_backward_is_not_recomputation(ranks, megatron):
    setup = "tests.support.warm"
    expected = {"forward": 1, "recompute": 1, "backward": 1}
    found = ranks(2, checkpointed_exchange, megatron, setup=setup, timeout=240)
    assert found == [expected, expected]


def two_groups() -> tuple[int, int, int, int, str]:
    pair = dist.new_group([0, 1], group_desc="first pair")
    with CommLedger() as ledger:
        dist.all_reduce(torch.ones(N))
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(N), group=pair)
            dist.all_reduce(torch.ones(N), group=pair)
        dist.all_reduce(torch.ones(N), group=dist.group.WORLD)
    return (
        ledger.calls(),
        ledger.calls(group=pair) if dist.get_rank() < 2 else 0,
        ledger.bytes(group="first pair"),
        ledger.calls(group=dist.group.WORLD),
        str(ledger),
    )


def test_groups_are_distinguished_by_object_and_by_description(ranks):
    first, _, third = ranks(3, two_groups)
    assert first[:4] == (4, 2, 2 * T, 2)
    assert third[:4] == (2, 0, 0, 2)
    assert "all_reduce  first pair  0,1    forward      2       96    96" in first[4]


def outside_the_ledger() -> int:
    with CommLedger() as ledger:
        pass
    dist.all_reduce(torch.ones(N))
    return ledger.calls()


def test_nothing_is_counted_outside_the_with_block(ranks):
    assert ranks(2, outside_the_ledger) == [0, 0]


def coalesced() -> list[tuple[str, int, int]]:
    size = dist.get_world_size()
    with CommLedger() as ledger:
        dist.all_reduce_coalesced([torch.ones(5), torch.ones(7)])
        dist.all_gather_coalesced(
            [[torch.empty(5), torch.empty(7)] for _ in range(size)], [torch.ones(5), torch.ones(7)]
        )
    return [(e.op, e.payload, e.wire) for e in ledger.events]


def test_a_coalesced_call_is_one_call_with_all_its_bytes(ranks):
    assert ranks(2, coalesced) == [[("all_reduce", 48, 48), ("all_gather", 48, 48)]] * 2
