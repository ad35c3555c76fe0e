"""Times of the virtual clock equal hand calculations; results of the code are unchanged."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._C._distributed_c10d import Work

from mindspeed.instruments import CommLedger, Link, VirtualClock

N = 64
PRODUCT = 2 * N**3  # FLOPs of one product; the clock makes them last 1 s
RATE = float(PRODUCT)
BYTES = 4 * N * N  # an all-reduce of two ranks sends as much as it reduces
LINK = Link(bytes_per_second=BYTES / 2, latency=0.5)  # so it takes 2.5 s


def new_clock() -> VirtualClock:
    return VirtualClock(RATE, LINK)


def exposed(schedule) -> tuple[float, float, float]:
    x, y = torch.ones(N, N), torch.ones(N, N)
    with new_clock() as clock:
        schedule(x, y)
    return clock.now, clock.exposed, clock.computing


def one_after_the_other(x, y):
    dist.all_reduce(x)
    y @ y


def hidden_in_part(x, y):
    work = dist.all_reduce(x, async_op=True)
    y @ y
    work.wait()
    assert x[0, 0] == 2


def hidden_whole(x, y):
    work = dist.all_reduce(x, async_op=True)
    for _ in range(3):
        y @ y
    work.wait()
    work.wait()  # no-op


def never_waited_for(x, y):
    dist.all_reduce(x, async_op=True)


def one_link_a_group(x, y):
    works = [dist.all_reduce(x.clone(), async_op=True) for _ in range(2)]
    for work in works:
        work.wait()


def waited_for_in_another_order(x, y):
    first, second = (dist.all_reduce(x.clone(), async_op=True) for _ in range(2))
    second.wait()  # ends after the first
    first.wait()


def computed_between_the_waits(x, y):
    first, second = (dist.all_reduce(x.clone(), async_op=True) for _ in range(2))
    first.wait()
    y @ y
    second.wait()


def functional(x, y):
    z = funcol.all_reduce(x, "sum", dist.group.WORLD)
    y @ y
    assert (z + 1)[0, 0] == 3  # waits


def coalesced(x, y):
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
    y @ y
    manager.wait()


SCHEDULES = {  # end, exposed, computing
    one_after_the_other: (3.5, 2.5, 1.0),
    hidden_in_part: (2.5, 1.5, 1.0),
    hidden_whole: (3.0, 0.0, 3.0),
    never_waited_for: (0.0, 0.0, 0.0),
    one_link_a_group: (5.0, 5.0, 0.0),
    waited_for_in_another_order: (5.0, 5.0, 0.0),
    computed_between_the_waits: (5.0, 4.0, 1.0),
    functional: (2.5, 1.5, 1.0),
    coalesced: (2.5, 1.5, 1.0),
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
def test_exposed_time_is_communication_without_overlap(ranks, schedule):
    for found in ranks(2, exposed, schedule):
        assert found == pytest.approx(SCHEDULES[schedule])


def two_groups() -> float:
    other = dist.new_group([0, 1])
    with new_clock() as clock:
        works = [
            dist.all_reduce(torch.ones(N, N), group=group, async_op=True) for group in (None, other)
        ]
        for work in works:
            work.wait()
    return clock.now


def test_groups_communicate_at_the_same_time(ranks):
    assert ranks(2, two_groups) == [pytest.approx(2.5)] * 2


def in_chunks(chunks: int) -> tuple[float, float, int]:
    """A product whose rows are reduced and scattered chunk by chunk, behind the next chunk."""
    x, w = torch.ones(N, N), torch.ones(N, N)
    out = torch.empty(N // 2, N)
    with VirtualClock(RATE, Link(BYTES / 4)) as clock, CommLedger() as ledger:
        works = []
        for rows, part in zip(x.chunk(chunks), out.chunk(chunks), strict=True):
            works.append(dist.reduce_scatter_tensor(part, rows @ w, async_op=True))
        for work in works:
            work.wait()
    assert torch.equal(out, torch.full_like(out, 2.0 * N))
    return clock.now, clock.exposed, ledger.wire_bytes("reduce_scatter")


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_chunks_hide_communication_as_the_pipeline_formula_says(ranks, chunks):
    """Product 1 s, communication 2 s (half of the bytes at a quarter of them a second)."""
    for end, waited, wire in ranks(2, in_chunks, chunks):
        assert wire == BYTES // 2
        assert end == pytest.approx(2 + 1 / chunks)
        assert waited == pytest.approx(end - 1)


def backward() -> list[tuple[str, str, float]]:
    x = torch.ones(N, N, requires_grad=True)
    with new_clock() as clock:
        y = (x @ x.detach()) @ torch.ones(N, N)
        y.sum().backward()
        dist.all_reduce(x.grad)
    assert [c.seconds for c in clock.select("communication", op="all_reduce")] == [2.5]
    assert not list(clock.select("wait", op="all_gather"))
    return [(i.kind, i.phase, i.seconds) for i in clock.intervals]


def test_intervals_have_kind_and_phase(ranks):
    expected = [("compute", "forward", 1.0)] * 2 + [("compute", "backward", 1.0)] * 2
    expected += [("communication", "forward", 2.5), ("wait", "forward", 2.5)]
    assert ranks(2, backward) == [expected] * 2


def outside() -> bool:
    before = Work.wait
    with new_clock() as clock:
        pass
    dist.all_reduce(torch.ones(N))
    return Work.wait is before and not clock.intervals


def test_nothing_is_timed_outside_the_with_block(ranks):
    assert ranks(2, outside) == [True, True]


def links() -> float:
    def link_of(communication):
        return Link(BYTES, 0.25) if communication.op == "all_reduce" else LINK

    with VirtualClock(RATE, link_of) as clock:
        dist.all_reduce(torch.ones(N, N))
    return clock.exposed


def test_a_function_chooses_the_link(ranks):
    assert ranks(2, links) == [1.25, 1.25]


# A product of 16384 x 5120 x 1920 in bf16 whose rows are scattered over 8 ranks.
M, K, COLUMNS, RANKS = 16384, 5120, 1920, 8
PEAK, LATENCY, BANDWIDTH = 300e12, 10e-6, 200e9


def chunks_of_a_large_product() -> dict[int, tuple[float, float, float, int, int]]:
    """On tensors without memory, in a process group without communication."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    x, w, out = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta")
        for shape in ((M, K), (K, COLUMNS), (M // RANKS, COLUMNS))
    )
    found = {}
    for chunks in (1, 2, 4, 8):
        clock = VirtualClock(PEAK, Link(BANDWIDTH, LATENCY))
        clock.scope = f"{chunks} chunks"
        with clock, CommLedger() as ledger:
            parts = zip(x.chunk(chunks), out.chunk(chunks), strict=True)
            works = [dist.reduce_scatter_tensor(o, r @ w, async_op=True) for r, o in parts]
            for work in works:
                work.wait()
        assert {interval.scope for interval in clock.intervals} == {f"{chunks} chunks"}
        flops = sum(interval.flops for interval in clock.intervals)
        wire = ledger.wire_bytes("reduce_scatter")
        found[chunks] = (clock.now, clock.exposed, clock.computing, wire, flops)
    return found


def test_times_of_a_large_product_are_those_of_the_closed_form(ranks):
    (found,) = ranks(1, chunks_of_a_large_product, backend=None)
    flops = 2 * M * K * COLUMNS
    nbytes = (RANKS - 1) * (M // RANKS) * COLUMNS * 2
    assert nbytes == 55_050_240
    computing, moving = flops / PEAK, nbytes / BANDWIDTH
    totals = {1: 1359.0, 2: 1221.4, 4: 1152.6, 8: 1118.2}
    waits = {1: 285.3, 2: 147.6, 4: 78.8, 8: 44.4}
    for chunks, (end, waited, computed, wire, counted) in found.items():
        longer, shorter = sorted((computing, moving + chunks * LATENCY))[::-1]
        assert end == pytest.approx(longer + shorter / chunks, abs=1e-8)
        assert waited == pytest.approx(end - computing, abs=1e-8)
        assert (end * 1e6, waited * 1e6) == pytest.approx((totals[chunks], waits[chunks]), abs=0.06)
        assert computed == pytest.approx(computing, abs=1e-12)
        assert (wire, counted) == (nbytes, flops)


def test_other_operators_take_the_time_of_their_bytes():
    """Views and allocations move nothing; what is repeated is read once."""
    x = torch.ones(N, N)
    with VirtualClock(RATE, LINK, memory_bytes_per_second=4 * N * N) as clock:
        x.t().view(N, N).detach()
        torch.empty_like(x)
        assert clock.now == 0
        x + x  # two reads and a write
        assert clock.now == 3
        x.add_(1)  # a read and a write
        assert clock.now == 5
        torch.zeros_like(x)
        assert clock.now == 6
        x[:1].expand(N, N).contiguous()
        assert clock.now == 7 + 1 / N
        x @ x  # its FLOPs only
        assert clock.now == 8 + 1 / N
    assert clock.computing == clock.now
    assert sum(one.memory_bytes for one in clock.intervals) == (7 * N + 1) * 4 * N
    with new_clock() as clock:
        x + x
    assert clock.now == 0
