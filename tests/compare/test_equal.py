"""Runs that differ by their layout only are equal: no false alarm, and nothing is left out."""

from __future__ import annotations

import pytest

from tests.compare.faults import CP2, PP2, SP2, VPP, ZERO
from tests.support.lazy import needs

needs("megatron.core")

RING = f"{CP2} --context-parallel-algo megatron_cp_algo"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OVERLAP = f"{ZERO} --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "tensor, sequence": (2, SP2),
    "sharded optimizer": (2, ZERO),
    "context": (2, CP2),
    "virtual pipeline": (2, VPP),
    "ring": (2, RING),
    "recomputed": (1, RECOMPUTED),
    "overlap": (2, OVERLAP),
    "loss of tokens": (2, "--calculate-per-token-loss"),
    "more ranks than groups": (4, "--tensor-model-parallel-size 4"),
    "pipeline, tensor": (4, f"{PP2} {SP2}"),
    "context, tensor": (4, f"{CP2} {SP2}"),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_equal_within_rounding(runs, layout):
    world, flags = LAYOUTS[layout]
    result = runs.compare(runs.record(world, flags))
    assert result.equal, result.first
    assert not result.before
    assert all(name.split()[-1] in ("grad_key", "grad_value") for name in result.only.get("A", []))
    assert len(result.rows) >= 260


@pytest.mark.slow
def test_a_fused_norm_is_no_difference(runs):
    result = runs.compare(runs.record(1, "--transformer-impl transformer_engine"))
    assert result.equal
    assert all("layernorm" in name for name in result.only["A"]) and "B" not in result.only
