"""Runs that differ by their layout only are equal: no false alarm, and nothing is left out."""

from __future__ import annotations

import pytest

from tests.compare.faults import CP2, PP2, SP2, VPP, ZERO
from tests.compare.job import Runs
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
    other = runs.record(world, flags)
    result = runs.compare(other)
    assert result.equal, result.first
    assert runs.compare(other, noise=False).equal
    assert not result.before
    assert all(name.split()[-1] in ("grad_key", "grad_value") for name in result.only.get("A", []))
    assert len(result.rows) >= 260


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 64 "
    "--moe-token-dispatcher-type alltoall --moe-layer-freq [0,1,0,1] "
    "--moe-shared-expert-intermediate-size 64 --transformer-impl transformer_engine"
)
PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss --calculate-per-token-loss"
AHEAD = "--mtp-num-layers 1 --transformer-impl transformer_engine"
TWO_STEPS = "--record-steps 0,1 --train-iters 2"
OTHERS = {
    "experts": (EXPERTS, "", [(2, "--expert-model-parallel-size 2"), (2, SP2)]),
    "experts, bf16": (f"{EXPERTS} --bf16", "", [(2, "--expert-model-parallel-size 2")]),
    "documents": (PACKED, "", [(2, f"{CP2} --context-parallel-algo adaptive_cp_algo"), (2, RING)]),
    "tokens ahead": (AHEAD, "", [(2, PP2), (2, SP2)]),
    "two steps": ("", TWO_STEPS, [(2, f"{SP2}"), (4, f"{SP2} {OVERLAP}")]),
    "two steps, bf16": ("--bf16", TWO_STEPS, [(2, f"{SP2}"), (2, OVERLAP)]),
    "loss scale": ("--fp16 --loss-scale 1024", "", [(2, f"{ZERO} --loss-scale 4096")]),
}


@pytest.mark.slow
@pytest.mark.parametrize("job", OTHERS)
def test_other_jobs_are_equal_in_other_layouts(rank_pool, tmp_path, job):
    model, recorded, layouts = OTHERS[job]
    runs = Runs(rank_pool.run, tmp_path, model, recorded)
    for world, flags in layouts:
        result = runs.compare(runs.record(world, flags))
        assert result.equal, (flags, result.first)
        assert not result.before and not result.only


@pytest.mark.slow
def test_a_fused_norm_is_no_difference(runs):
    result = runs.compare(runs.record(1, "--transformer-impl transformer_engine"))
    assert result.equal
    assert all("layernorm" in name for name in result.only["A"]) and "B" not in result.only


@pytest.mark.slow
def test_a_part_of_the_tensors_is_recorded(runs):
    kinds = "--record-what main-weights --record-micro-batches 1"
    result = runs.compare(runs.record(2, f"{ZERO} {kinds}"))
    assert result.equal and {row.name.what for row in result.rows} == {"main_weight"}
    only = runs.compare(runs.record(1, "--record-what activations loss --record-micro-batches 1"))
    assert {row.name.micro_batch for row in only.rows} == {1}
