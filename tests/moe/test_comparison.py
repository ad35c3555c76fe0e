"""What hides which collective, and for how long: each row of the comparison by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed.instruments.clock import Link
from mindspeed.moe.comparison import LayerJob, compare, rates_of
from mindspeed.moe.parted_costs import Attention
from mindspeed.moe.simulate import RankRates
from mindspeed.moe.sizes import Sizes

N, H, E, K, F, S = 64, 32, 8, 2, 48, 40
SIZES = Sizes(tokens=N, hidden=H, experts=E, topk=K, ffn=F, ep=2, itemsize=4, shared=S)
FLOPS, LATENCY = 1e9, 1e-6
ATTENTION = Attention(inputs=4e5, core=3e5, output=2e5)
# From links that anything hides to those that nothing hides.
BANDWIDTHS = [1e12, 3e8, 1e8, 3e7, 1e7, 3e6]


@pytest.fixture(params=BANDWIDTHS, ids="{:.0e}".format)
def times(request):
    """Seconds of computations in forward, and of collectives."""
    link = Link(request.param, LATENCY)

    def send(nbytes):
        return LATENCY + nbytes / request.param

    rows = N * K / 2  # to the other rank
    return SimpleNamespace(
        link=link,
        send=send,
        rows=rows,
        route=2 * N * H * E / FLOPS,
        attention=9e5 / FLOPS,
        experts=2 * N * K * H * 3 * F / FLOPS,
        shared1=2 * N * H * 2 * S / FLOPS,
        shared2=2 * N * H * S / FLOPS,
        counts=send(8 * E),
        two=send(rows * H * 4) + send(rows * 4),  # rows and probabilities
        packed=send(rows * (H * 4 + 16)),
        combine=send(rows * H * 4),
    )


def timeline(times, name, sizes=SIZES):
    rates = RankRates(FLOPS, lambda message: times.link.seconds(message.wire * message.busiest))
    (found,) = compare(LayerJob(sizes, rates, attention=ATTENTION), [name])
    assert found.simulation is not None, found.reason
    return found.simulation


def shown(line):
    """Exposed collectives of all, forward and backward."""
    return tuple((len(line.log.exposed(p)), line.calls(p)) for p in ("forward", "backward"))


def over(communication, computation):
    return max(0.0, communication - computation)


def test_megatrons_layer_hides_nothing(times):
    line, t = timeline(times, "megatron"), times
    assert line.exposed() == pytest.approx(t.counts + 2 * (t.two + t.combine))
    assert shown(line) == ((4, 4), (3, 3))


def test_shared_experts_beside_the_all_to_alls(times):
    line, t = timeline(times, "shared-overlap"), times
    assert line.exposed("forward") == pytest.approx(
        t.counts + over(t.two, t.shared1) + over(t.combine, t.shared2)
    )
    assert line.exposed("backward") == pytest.approx(
        over(t.combine, 2 * t.shared2) + over(t.two, 2 * t.shared1)
    )
    assert shown(line) == ((1, 4), (0, 3))


@pytest.mark.parametrize("name", ["1f1b", "fb-overlap"])
def test_two_micro_batches(times, name):
    """Both streams, by what each part waits for."""
    line, t, delayed = timeline(times, name), times, name == "fb-overlap"
    before = t.attention + t.shared1 + t.shared2 + t.route
    attended = before + t.counts
    combined_b = t.combine
    dispatched_f = max(attended, combined_b) + t.two
    input_gradients = max(attended, combined_b) + t.experts * (1 if delayed else 2)
    gradients = input_gradients + (t.experts if delayed else 0)
    dispatched_b = max(input_gradients, dispatched_f) + t.two
    computed_f = max(gradients, dispatched_f) + t.experts
    combined_f = max(computed_f, dispatched_b) + t.combine
    end = max(max(computed_f, dispatched_b) + 2 * before, combined_f)
    assert line.total == pytest.approx(end)
    assert line.exposed() == pytest.approx(end - 3 * (before + t.experts))
    assert shown(line) == ((1, 4), (0, 3))


def test_attention_of_a_chunk_beside_the_dispatch_of_another(times):
    line, t = timeline(times, "ampipe"), times
    # The first rows see a quarter of the keys that a causal mask leaves.
    first, second = (4e5 + 3e5 / 4 + 1e5) / FLOPS, (3e5 * 3 / 4 + 1e5) / FLOPS
    half = SimpleNamespace(
        route=t.route / 2,
        experts=t.experts / 2,
        dispatch=t.send(t.rows / 2 * (H * 4 + 16)),
        combine=t.send(t.rows / 2 * H * 4),
    )
    now = first + half.route + t.counts
    arrived0 = now + half.dispatch
    now += second + half.route + t.counts
    arrived1 = max(now, arrived0) + half.dispatch
    now = max(now + t.shared1, arrived0) + half.experts
    back0 = max(now, arrived1) + half.combine
    now = max(now, arrived1) + half.experts
    back1 = max(now, back0) + half.combine
    end = max(now + t.shared2, back1)
    assert line.ends["forward"] == pytest.approx(end)
    arrived1 = end + half.combine  # the last chunk first
    arrived0 = arrived1 + half.combine
    now = max(end + 2 * t.shared2, arrived1) + half.experts
    back1 = max(now, arrived0) + half.dispatch
    now = max(now, arrived0) + half.experts
    back0 = max(now, back1) + half.dispatch
    now = max(now + t.experts + 2 * t.shared1, back1) + 2 * (half.route + second)
    now = max(now, back0) + 2 * (half.route + first)
    assert line.total == pytest.approx(now)
    computing = 3 * (t.attention + t.route + t.experts + t.shared1 + t.shared2)
    assert line.exposed() == pytest.approx(now - computing)
    assert shown(line) == ((0, 6), (0, 4))


def test_weights_of_hot_experts_beside_the_permutation_and_shared_experts(times):
    """Three of eight, one in each message; a rank of two sends and gets what is sent."""
    line, t = timeline(times, "balanced"), times
    part = 3 / E
    weights = 3 * t.send(3 * H * F * 4)
    dispatch = t.send(t.rows * (1 - part) * (H * 4 + 16))
    combine = t.send(t.rows * (1 - part) * H * 4)
    hot, rest = part * t.experts, (1 - part) * t.experts
    start = t.attention + t.route + t.counts
    now = max(start + t.shared1, start + weights) + hot
    now = max(now, start + weights + dispatch) + rest
    end = now + max(t.shared2, combine)
    assert line.ends["forward"] == pytest.approx(end)
    now = end + max(2 * t.shared2, combine) + rest
    dispatched = now + dispatch
    now += rest + 2 * hot
    returned = max(now, dispatched) + weights
    now = max(now + 2 * t.shared1, dispatched, returned) + 2 * (t.attention + t.route)
    assert line.total == pytest.approx(now)
    assert shown(line) == ((1, 6), (0, 5))


BOUND = 1.25 * N * K / 2  # rows that a rank sends another at most


@pytest.mark.parametrize("carrier", ["blocks", "symmetric", "hybridep"])
def test_rows_of_a_bound(times, carrier):
    """Blocks are sent whole; symmetric memory sends the rows, HybridEP a token once to a rank."""
    name = "device" if carrier == "blocks" else f"device-{carrier}"
    line, t = timeline(times, name), times
    if carrier == "hybridep":
        once = N * (1 - 6 / 28)  # tokens with one of two experts of eight on the other rank
        there, back = t.send(once * (H * 4 + 4 * E / 2)), t.send(once * H * 4)
        assert line.exposed("forward") == pytest.approx(there + back)
        assert line.exposed("backward") == pytest.approx(there + back)
        assert shown(line) == ((2, 2), (2, 2))
        return
    rows = BOUND if carrier == "blocks" else t.rows
    there, back = t.send(rows * (H * 4 + 16)), t.send(rows * H * 4)
    counted = t.send(8 * E / 2) + t.attention + t.route  # to the rank of the experts only
    forward = max(counted + there, counted + t.shared1) + t.experts + max(back, t.shared2)
    assert line.ends["forward"] == pytest.approx(forward)
    assert line.exposed("backward") == pytest.approx(
        over(back, 2 * t.shared2) + over(there, 2 * t.shared1 + t.experts)
    )
    assert shown(line) == ((0, 3), (0, 2))  # the permutation is beside the counts


def test_symmetric_memory_copies_what_it_sends_and_what_arrives():
    """In and out of buffers: read and written, at the rate of the memory, before a link helps."""
    rate, sizes = 1e9, Sizes(**(vars(SIZES) | {"shared": 0}))
    link = SimpleNamespace(seconds=lambda nbytes: 0.0)
    job = LayerJob(sizes, rates_of(1e30, link, link, rate))
    blocks, symmetric = (one.simulation for one in compare(job, ["device", "device-symmetric"]))
    assert blocks.exposed() == 0
    rows = 2 * BOUND + N * K  # a buffer as long as the bound, and one as long as what is sent
    assert symmetric.exposed() == pytest.approx(2 * 2 * rows * (2 * H * 4 + 16) / rate)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("shared-overlap", {"shared": 0}, "without shared experts"),
        ("1f1b", {"ep": 1}, "no all-to-all to hide"),
        ("fb-overlap", {"ep": 1}, "no all-to-all to hide"),
        ("ampipe", {"ep": 1}, "no all-to-all to hide"),
        ("ampipe", {"tokens": 63}, "2 chunks do not divide"),
        ("ampipe-slices", {}, "--etp 1"),
        ("device-hybridep", {"ep": 1}, "nothing is sent"),
        ("device", {"ep": 1}, "nothing is sent"),
        ("device-hybridep", {"etp": 2}, "need every copy"),
        ("balanced", {"etp": 2}, "not sliced"),
        ("balanced", {"ep": 1}, "no other ranks"),
        ("balanced", {"ep": 4}, "3 hot experts are more than the 2"),
    ],
)
def test_rows_that_a_job_cannot_have(name, change, said):
    sizes = Sizes(**(vars(SIZES) | change))
    (found,) = compare(LayerJob(sizes, RankRates(1.0, lambda message: 0.0)), [name])
    assert said in found.reason


def test_chunks_of_sliced_experts_hide_all_but_the_first_gather_and_the_last_sum():
    """Rates so slow that every computation hides any collective; the memory's, too."""
    sizes = Sizes(**(vars(SIZES) | {"etp": 2, "shared": 0}))
    rates = RankRates(1.0, lambda message: 1e-9)
    job = LayerJob(sizes, rates, tp=2, attention=ATTENTION)
    plain, sliced = (one.simulation for one in compare(job, ["ampipe", "ampipe-slices"]))
    assert [len(plain.log.exposed(p)) for p in ("forward", "backward")] == [4, 4]
    assert [len(sliced.log.exposed(p)) for p in ("forward", "backward")] == [2, 2]
