"""Roofline of operators: quantisation, corrections by measured products, monotonicity."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed.instruments.clock import VirtualClock
from mindspeed.instruments.ledger import Communication
from mindspeed.planner.cluster import Cluster, Device, Level, MeasuredProduct
from mindspeed.planner.cluster.operations import Operation
from mindspeed.planner.cluster.rates import GROUP, PLAIN, DeviceRates, Experts, RatedJob

# Round figures: 1e12 FLOP/s, of which 10 cores compute tiles of 16 x 16; 1e9 bytes per second.
DEVICE = Device(
    "test",
    {"fp32": 1.0, "bf16": 2.0},
    memory_gib=8,
    memory_gbs=1e6,
    launch_us=0.0,
    cores=10,
    tile=(16, 16),
    gemm_efficiency=1.0,
    attention_efficiency=0.5,
    memory_efficiency=1.0,
)


def rates(program: RatedJob = PLAIN, **changes: object) -> DeviceRates:
    device = dataclasses.replace(DEVICE, **changes)
    levels = (Level("node", None, 1, 0),)
    return DeviceRates(Cluster("test", device, levels), program)


def test_whole_waves_attain_the_peak() -> None:
    m, n, k = 160, 16 * 7, 64  # 70 tiles on 10 cores
    assert rates().product_seconds(m, n, k, "fp32") == pytest.approx(2 * m * n * k / 1e12)
    assert rates().product_seconds(m, n, k, "bf16") == pytest.approx(2 * m * n * k / 2e12)


def test_a_dtype_may_attain_a_part_of_its_own() -> None:
    slower = rates(gemm_efficiencies={"bf16": 0.25})
    for dtype, times in (("fp32", 1), ("bf16", 4)):
        expected = times * rates().product_seconds(160, 112, 64, dtype)
        assert slower.product_seconds(160, 112, 64, dtype) == pytest.approx(expected)


def test_one_tile_more_is_a_whole_wave() -> None:
    wave = 10 * 2 * 16 * 16 * 4096 / 1e12
    assert rates().product_seconds(160, 16, 4096, "fp32") == pytest.approx(wave)
    one_more = rates().product_seconds(176, 16, 4096, "fp32")
    assert wave * 1.1 < one_more < 2 * wave * (1 + 1e-9)


def test_few_tiles_are_divided_along_the_summed_dimension() -> None:
    one_core = 2 * 16 * 16 * 80000 / 1e11
    assert rates().product_seconds(16, 16, 80000, "fp32") < one_core / 4


def test_a_thin_product_is_bound_by_memory() -> None:
    slow = rates(memory_gbs=1.0, memory_efficiency=0.5)
    nbytes = 4 * (1000 * 1 + 1 * 1000 + 1000 * 1000)
    assert slow.product_seconds(1000, 1000, 1, "fp32") == pytest.approx(nbytes / 0.5e9)


def test_every_operator_is_launched() -> None:
    late = rates(launch_us=3.0)
    more = late.product_seconds(64, 64, 64, "fp32") - rates().product_seconds(64, 64, 64, "fp32")
    assert more == pytest.approx(3e-6)


def test_measured_products_are_reproduced_and_correct_their_neighbours() -> None:
    plain = rates().product_seconds(160, 160, 1024, "fp32")
    twice = MeasuredProduct("fp32", 160, 160, 1024, 2 * plain)
    half = MeasuredProduct(
        "fp32", 16000, 16000, 1024, 0.5 * rates().product_seconds(16000, 16000, 1024, "fp32")
    )
    measured = rates(products=(twice, half))
    assert measured.product_seconds(160, 160, 1024, "fp32") == pytest.approx(2 * plain)
    near = measured.product_seconds(320, 160, 1024, "fp32")
    assert 1.5 < near / rates().product_seconds(320, 160, 1024, "fp32") < 2
    other = measured.product_seconds(160, 160, 1024, "bf16")
    assert other == rates().product_seconds(160, 160, 1024, "bf16")


sizes = st.integers(1, 3000)


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, sizes, st.integers(1, 8), st.integers(0, 2), st.integers(0, 1000))
def test_larger_products_never_take_less(
    m: int, n: int, k: int, batch: int, which: int, more: int
) -> None:
    grown = [m, n, k]
    grown[which] += more
    model = rates(memory_gbs=10.0)
    usual = model.product_seconds(m, n, k, "fp32", batch)
    assert model.product_seconds(*grown, "fp32", batch) >= usual * (1 - 1e-12)
    assert model.product_seconds(m, n, k, "fp32", batch + 1) >= usual * (1 - 1e-12)
    assert usual >= 2 * batch * m * n * k / 1e12 * (1 - 1e-12)  # never above the peak


def test_the_clock_times_operators_by_their_kind() -> None:
    model = rates()
    a, b = torch.ones(160, 64), torch.ones(64, 112)
    with VirtualClock.of(model) as clock:
        c = a @ b
        c.view(-1)
        c + c
    product, added = clock.select("compute")
    assert product.seconds == pytest.approx(model.product_seconds(160, 112, 64, "fp32"))
    assert added.seconds == pytest.approx(2 * c.numel() * 4 / 1e15 + c.numel() * 4 / 1e15, rel=0.5)


def test_causal_attention_computes_half_of_the_scores() -> None:
    q = torch.ones(1, 2, 64, 32)
    seconds = []
    for causal in (False, True):
        with VirtualClock.of(rates(memory_gbs=1e9)) as clock:
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal)
        seconds.append(clock.now)
    flops = 4 * 2 * 64 * 64 * 32
    assert seconds[0] == pytest.approx(flops / 0.5e12)
    assert seconds[1] == pytest.approx(flops / 0.5e12 * 65 / 128)


def test_sustained_peaks_slow_products_and_attention() -> None:
    attention = Operation("attention", 10**12, 0, dtype="fp32", keys=64, head=32)
    for part in (1.0, 0.5):
        held = rates(sustained=part)
        assert held.product_seconds(160, 112, 64, "fp32") == pytest.approx(
            rates().product_seconds(160, 112, 64, "fp32") / part
        )
        assert held.seconds(attention) == pytest.approx(2.0 / part)


def test_attention_follows_its_curves() -> None:
    curved = rates(attention_keys=((64, 0.5), (256, 1.0)), attention_heads=((64, 0.5), (128, 1.0)))
    for keys, factor in ((1, 0.5), (64, 0.5), (128, 0.75), (256, 1.0), (9999, 1.0)):
        one = Operation("attention", 10**12, 0, dtype="fp32", keys=keys, head=128)
        assert curved.seconds(one) == pytest.approx(2.0 / factor)
    small = Operation("attention", 10**12, 0, dtype="fp32", keys=256, head=64)
    assert curved.seconds(small) == pytest.approx(4.0)
    back = Operation("attention_backward", 10**12, 0, dtype="fp32", keys=256, head=128)
    assert rates(attention_backward=0.8).seconds(back) == pytest.approx(2.5)


def test_rows_that_are_not_aligned_are_slower() -> None:
    model = rates(misaligned=1.25)
    for n, k, slower in ((192, 256, 1.0), (200, 256, 1.25), (192, 250, 1.25)):
        plain = rates().product_seconds(160, n, k, "fp32")
        assert model.product_seconds(160, n, k, "fp32") == pytest.approx(slower * plain)


LINEAR = Operation("aten::mm", 1, 2 * 3 * 160 * 160, (160, 160, 160, "bf16"), 1, "bf16")


def test_a_job_in_fp8_multiplies_in_fp8_and_pays_for_its_casts() -> None:
    peaks = {"fp32": 1.0, "bf16": 2.0, "fp8": 4.0}
    low = rates(RatedJob("bf16", "mxfp8", frozenset({7})), peak_tflops=peaks, memory_gbs=1e3)
    plain = rates(peak_tflops=peaks, memory_gbs=1e3)
    cast = 160 * 160 * (4 + 2) / 1e12  # read twice in bf16, written twice in fp8
    product = low.product_seconds(160, 160, 160, "fp8")
    assert product == pytest.approx(plain.product_seconds(160, 160, 160, "bf16") / 2)
    assert low.seconds(LINEAR) == pytest.approx(product + cast)
    weights = dataclasses.replace(LINEAR, name="mindspeed::matmul_add")
    assert low.seconds(weights) == pytest.approx(product)  # its operands were cast before
    emulated = dataclasses.replace(
        LINEAR, product=(160, 160, 160, "fp32"), dtype="fp32", stands_for="product"
    )
    assert low.seconds(emulated) == low.seconds(LINEAR)
    kept = dataclasses.replace(LINEAR, product=(160, 7, 160, "bf16"))
    assert low.seconds(kept) == plain.seconds(kept)  # the router, and the output layer


def test_what_a_cpu_emulates_takes_no_time() -> None:
    inside = Operation("aten::mul", 0, 10**9, stands_for="attention")
    cast = Operation("aten::mul", 0, 10**9, stands_for="product")
    assert rates().seconds(inside) == 0.0
    assert rates().seconds(cast) > 0.0
    assert rates(RatedJob("bf16", "fp8")).seconds(cast) == 0.0


def test_products_of_experts_share_the_last_wave() -> None:
    alone = Operation("aten::mm", 1, 0, (16, 32, 64, "fp32"), 1, "fp32")
    many = dataclasses.replace(alone, grouped=True)
    together = rates().product_seconds(16, 32, 64, "fp32", GROUP)
    assert rates().seconds(many) == pytest.approx(together / GROUP)
    assert rates().seconds(many) < rates().seconds(alone)
    late = rates(launch_us=3.0)
    following = dataclasses.replace(many, starts=False)
    assert late.seconds(many) - late.seconds(following) == pytest.approx(3e-6)


def test_a_device_waits_for_its_host_when_its_queue_is_empty() -> None:
    long, short = (Operation("aten::mul", 0, size) for size in (10_000, 1_000))
    model = rates(memory_gbs=1.0, host_us=4.0)
    taken = [model.queued(one, model.seconds(one)) for one in (long, short, short, short, short)]
    # 10 us of work are queued after the first, and each short one takes 3 of them
    assert taken == pytest.approx([14e-6, 1e-6, 1e-6, 1e-6, 4e-6])
    inside = dataclasses.replace(short, starts=False)
    assert model.queued(inside, 1e-6) == 1e-6


@pytest.mark.parametrize("waits", [True, False])
def test_a_host_that_waits_for_the_sizes_of_an_exchange_is_late(waits: bool) -> None:
    model = rates(RatedJob(waits=waits), memory_gbs=1.0, host_us=4.0, exchange_us=100.0)
    long, short = (Operation("aten::mul", 0, size) for size in (10_000, 1_000))
    model.queued(long, model.seconds(long))
    exchange = ("all_to_all", "", "EXPERT_MODEL_PARALLEL_GROUP", (0, 1), "forward", 8, 4)
    model.communication(Communication(*exchange))
    late = 104e-6 if waits else 0.0
    assert model.queued(short, model.seconds(short)) == pytest.approx(1e-6 + late)
    assert model.queued(short, model.seconds(short)) == pytest.approx(4e-6 if waits else 1e-6)


def test_a_token_reaches_fewer_ranks_than_experts() -> None:
    experts = Experts(8, 2)
    assert experts.reached(1) == 1.0
    assert experts.reached(8) == pytest.approx(2.0)  # each rank has one expert
    assert experts.reached(2) == pytest.approx(2 * (1 - 6 / 28))
