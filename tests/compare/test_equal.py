"""Runs that differ by their layout only are equal: no false alarm, and nothing is left out."""

from __future__ import annotations

import pytest

from tests.compare.pairs import PAIRS
from tests.support.lazy import needs

needs("megatron.core")

QUICK = ("dense, fp32, layout 1", "dense, fp32, layout 7", "dense, fp32, layout 4")
DAILY = (
    *QUICK,
    "dense, fp32, layout 3",
    "dense, fp32, layout 0",
    "dense, fp32, layout 18",
    "experts, fp32, layout 4",
    "experts, all-gather",
    "documents, ring",
    "ahead, stages",
    "zb-v",
    "two steps, overlap, bf16",
    "two steps, zero 2, bf16",
    "fp16, other loss scale",
    "fp8 blockwise, tensor",
)
TIE = "because two scores are as close as rounding"
NAMES = [*DAILY, *(name for name in PAIRS if name not in DAILY)]


@pytest.mark.weekly_cases(*(name for name in NAMES if name not in DAILY))
@pytest.mark.quick_cases(len(QUICK))
@pytest.mark.parametrize("pair", NAMES)
def test_runs_are_equal_within_rounding(campaign, pair):
    result = campaign.equal(PAIRS[pair])
    assert result.equal, result.first
    assert all(TIE in sentence for sentence in result.before)  # a processor may round to one
    assert "B" not in result.only, result.only
    # Weights, gradients and states are there in every layout; a fused layer hides its parts.
    kept = {row.name.what for row in result.rows if row.name.when in ("begin", "end")}
    assert kept.isdisjoint(name.split(" ", 1)[1] for name in result.only.get("A", ())), result.only
    assert len(result.rows) > 200


@pytest.mark.parametrize("layout", ["dense, fp32, layout 1"])
def test_without_runs_with_noise_it_is_estimated(campaign, layout):
    assert campaign.equal_without_noise(PAIRS[layout]).equal


@pytest.mark.slow
def test_a_fused_norm_is_no_difference(campaign):
    runs = campaign.runs("dense", 1234)
    result = runs.compare(runs.record(1, "--transformer-impl transformer_engine"))
    assert result.equal
    assert all("layernorm" in name for name in result.only["A"]) and "B" not in result.only


@pytest.mark.slow
def test_a_part_of_the_tensors_is_recorded(campaign):
    runs = campaign.runs("dense", 1234)
    kinds = "--record-what main-weights --record-micro-batches 1"
    result = runs.compare(runs.record(2, f"--use-distributed-optimizer {kinds}"))
    assert result.equal and {row.name.what for row in result.rows} == {"main_weight"}
    only = runs.compare(runs.record(1, "--record-what activations loss --record-micro-batches 1"))
    assert {row.name.micro_batch for row in only.rows} == {1}
