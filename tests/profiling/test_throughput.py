"""The throughput meter against FLOPs and seconds counted by hand, with a fake clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed.profiling import throughput
from mindspeed.profiling.model_flops import ModelShape, model_flops
from mindspeed.profiling.throughput import Throughput, ThroughputMeter, describe
from tests.profiling.throughput_ranks import flops_of_uneven_work

PRODUCT = 2 * 2 * 3 * 5  # FLOPs of product()


def product(rows: int = 2) -> None:
    torch.ones(rows, 3) @ torch.ones(3, 5)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_steps_of_one_signature_are_counted_once_and_added_each_time():
    meter = ThroughputMeter(lambda: "same")
    for work in (product, lambda: None, lambda: None):  # the later ones are taken as equal
        with meter.step(4):
            work()
    found = meter.read()
    assert (found.without_recompute, found.with_recompute) == (3 * PRODUCT, 3 * PRODUCT)
    assert found.sequences == 12


def test_a_new_signature_is_counted_anew_and_an_old_one_is_remembered():
    rows = iter([2, 4, 2])
    signatures = iter(["two", "four", "two"])
    meter = ThroughputMeter(lambda: next(signatures))
    for _ in range(3):
        with meter.step(1):
            product(next(rows))
    assert meter.read().with_recompute == 4 * PRODUCT


def test_steps_without_signature_are_all_counted():
    meter = ThroughputMeter(lambda: None)
    for rows in (2, 4, 6):
        with meter.step(1):
            product(rows)
    assert meter.read().with_recompute == 6 * PRODUCT


def test_recomputation_counts_only_in_flops_with_recompute():
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(3, 5, requires_grad=True)
    meter = ThroughputMeter(lambda: 0)
    with meter.step(1):
        checkpoint(lambda y: (y @ weight).sin(), x, use_reentrant=False).sum().backward()
    found = meter.read()
    assert (found.without_recompute, found.with_recompute) == (3 * PRODUCT, 4 * PRODUCT)


def test_seconds_include_steps_and_the_final_synchronisation(clock):
    meter = ThroughputMeter(lambda: 0)
    for _ in range(2):
        with meter.step(1):
            clock.now += 3
        clock.now += 50  # evaluation, a checkpoint
    clock.now -= 50
    clock.now += 0.5  # the device had still to finish
    assert meter.read().seconds == 2 * 3 + 0.5


def test_reading_resets_the_interval_and_keeps_totals(clock):
    meter = ThroughputMeter(lambda: 0)
    with meter.step(1):
        clock.now += 3
        product()
    meter.read()
    clock.now += 50
    assert meter.read() == Throughput(0.0, 0.0, 0, 0.0)
    with meter.step(2):
        clock.now += 1
    assert meter.read() == Throughput(PRODUCT, PRODUCT, 2, 1.0)


def test_ranks_read_their_mean(ranks):
    mean = 1.5 * PRODUCT
    assert ranks(2, flops_of_uneven_work) == [(mean, mean)] * 2


SHAPE = ModelShape(
    moe_layers=(False, False),
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    ffn_hidden_size=256,
    seq_length=128,
    vocab_size=1000,
)


def test_the_log_names_device_and_figures(monkeypatch):
    monkeypatch.setattr(throughput.device, "current", lambda: SimpleNamespace(name="npu"))
    measured = Throughput(without_recompute=3e12, with_recompute=4e12, sequences=8, seconds=2.0)
    executed = (
        "actual throughput per NPU (TFLOP/s/NPU): 1.5 | "
        "actual throughput per NPU with recompute (TFLOP/s/NPU): 2"
    )
    assert describe(measured, None) == executed
    halved, whole = (model_flops(SHAPE, 8, causal=causal) / 2e12 for causal in (True, False))
    model = "model throughput per NPU, causal attention counted half / whole (TFLOP/s/NPU)"
    assert halved < whole
    assert describe(measured, SHAPE) == f"{executed} | {model}: {halved:.4g} / {whole:.4g}"


def test_model_throughput_is_shared_by_the_ranks(monkeypatch):
    ranks = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 8)
    measured = Throughput(without_recompute=3e12, with_recompute=4e12, sequences=8, seconds=2.0)
    alone = describe(measured, SHAPE).split(": ")[-1].split(" / ")
    monkeypatch.setattr(throughput, "dist", ranks)
    shared = describe(measured, SHAPE).split(": ")[-1].split(" / ")
    assert [float(value) * 8 for value in shared] == pytest.approx(
        list(map(float, alone)), rel=1e-3
    )
