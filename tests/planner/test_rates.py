"""Roofline of operators: quantisation, corrections by measured products, monotonicity."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed.instruments.clock import VirtualClock
from mindspeed.planner.cluster import Cluster, Device, Level, Measured
from mindspeed.planner.cluster.rates import DeviceRates

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


def rates(fused: bool = False, **changes: object) -> DeviceRates:
    device = dataclasses.replace(DEVICE, **changes)
    levels = (Level("node", None, 1, 0),)
    return DeviceRates(Cluster("test", device, levels, fused_chains=fused))


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
    assert slow.moving_seconds(nbytes) == pytest.approx(nbytes / 0.5e9)


def test_every_operator_is_launched() -> None:
    late = rates(launch_us=3.0)
    assert late.moving_seconds(0) == pytest.approx(3e-6)
    more = late.product_seconds(64, 64, 64, "fp32") - rates().product_seconds(64, 64, 64, "fp32")
    assert more == pytest.approx(3e-6)


def test_measured_products_are_reproduced_and_correct_their_neighbours() -> None:
    plain = rates().product_seconds(160, 160, 1024, "fp32")
    twice = Measured("fp32", 160, 160, 1024, 2 * plain)
    half = Measured(
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
    assert model.products == {(160, 112, 64, "fp32"): 1}


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


def test_a_fused_chain_moves_its_ends_alone() -> None:
    """x -> a -> b -> c, and the product that reads c ends the chain."""
    x = torch.ones(64, 64)
    once = x.numel() * 4 / 1e9
    found = {}
    for fused in (False, True):
        with VirtualClock.of(rates(fused, memory_gbs=1.0, launch_us=100.0)) as clock:
            a = x.exp()
            b = a * x  # x from the memory again: nothing but what the chain makes is remembered
            c = b.sqrt().neg()
            product = c @ c
            product.exp()
        times = [one.seconds for one in clock.select("compute") if one.name != "aten::mm"]
        found[fused] = sum(times)
    launch = 100e-6
    # reads: exp 1, mul 2, sqrt 1, neg 1, exp 1; writes: one each
    assert found[False] == pytest.approx(11 * once + 5 * launch)
    # read x twice, write c; then read the product, write its exponential
    assert found[True] == pytest.approx(5 * once + 2 * launch)
