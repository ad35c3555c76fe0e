"""Counted bytes are the closed forms; seconds of a step are those of its parts."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest

from mindspeed.planner.cluster import load_cluster
from mindspeed.planner.count.layer_costs import START, Scope, by_scope
from tests.planner import timed_jobs
from tests.support.lazy import needs

needs("megatron.core")

SETUP = "tests.support.warm"
S, B, H, E = 32, 2, 64, 2  # sequence, micro-batch, hidden size, bytes of bf16
DATA, TENSOR = "DATA_PARALLEL_GROUP_WITH_CP", "TENSOR_MODEL_PARALLEL_GROUP"


BASE = "--bf16 --tensor-model-parallel-size 2 --sequence-parallel"
DEEP = f"{BASE} --num-layers 3"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
REDUCED = "--bf16 --num-layers 4 --global-batch-size 4"
BUCKETS = "--overlap-grad-reduce --ddp-bucket-size 10000"
JOBS = {
    "plain": (DEEP, 4),
    "recomputed": (f"{DEEP} {RECOMPUTE}", 4),
    "longer": (f"{DEEP} --global-batch-size 16", 4),
    "late": (REDUCED, 2),
    "hidden": (f"{REDUCED} {BUCKETS}", 2),
}


@pytest.fixture(scope="module")
def steps(rank_pool: Any) -> Any:
    """Timed steps of :data:`JOBS`."""
    jobs = list(JOBS.values())
    (found,) = rank_pool.run(1, timed_jobs.timed, jobs, setup=SETUP, backend=None, timeout=240)
    return dict(zip(JOBS, found, strict=True))


@pytest.mark.slow
def test_counted_bytes_are_the_closed_forms(ranks: Any) -> None:
    """A layer with tensor and sequence parallelism; gradients and parameters over data."""
    tp = f"{BASE} --global-batch-size 4"
    plain, sharded = "--global-batch-size 8", "--bf16 --use-distributed-optimizer"
    jobs = [(f"{tp} --num-layers {layers}", 4) for layers in (1, 2)]
    (found,) = ranks(
        1,
        timed_jobs.counted,
        [*jobs, (plain, 4), (sharded, 4)],
        setup=SETUP,
        backend=None,
        timeout=240,
    )
    (_, one), (_, two), (parameters, reduced), (sharded_parameters, gathered) = found
    layer = {key[::2]: two[key] - one[key] for key in two if key[1] == TENSOR}
    full = S * B * H * E
    # Forward: gather before QKV and FC1, scatter after the others. Backward: the reverse of all,
    # and both inputs again for their weight gradients.
    assert layer["all_gather", "forward"] == 2 * full // 2
    assert layer["reduce_scatter", "forward"] == 2 * full
    assert layer["all_gather", "backward"] == 4 * full // 2
    assert layer["reduce_scatter", "backward"] == 2 * full
    assert reduced["all_reduce", DATA, "forward"] == 4 * parameters
    padded = 128 * ceil(sharded_parameters / 128)  # Megatron pads the bucket to lcm(128, dp)
    assert gathered["reduce_scatter", DATA, "forward"] == 4 * padded
    assert gathered["all_gather", DATA, "forward"] == 2 * padded // 4


def seconds_of(step: Any, scope: Any) -> dict[str, float]:
    """Seconds of a part of a chunk by phase, waits included."""
    phases = by_scope(step.intervals)[scope]
    return {phase: costs.computing + costs.exposed for phase, costs in phases.items()}


@pytest.mark.slow
def test_the_parts_of_a_step_are_its_seconds(steps: Any) -> None:
    plain, again, more = (steps[name] for name in ("plain", "recomputed", "longer"))
    assert plain.micro_batches == 2
    (chunk,) = plain.chunks
    line = [one for one in plain.intervals if one.kind != "communication"]
    assert sum(one.seconds for one in line) == pytest.approx(plain.seconds, rel=1e-9)
    before = sum(one.seconds for one in line if one.scope == START)
    parts = 2 * sum(chunk.values()) + plain.gradient_seconds + plain.optimizer_seconds + before
    assert parts == pytest.approx(plain.seconds, rel=1e-9)
    assert chunk["recompute"] == 0 and min(chunk["forward"], chunk["backward"]) > 0
    assert plain.optimizer_seconds > 0 and plain.gradient_seconds > plain.exposed[DATA] * 0.99

    layers = [seconds_of(plain, Scope("layer", 0, number)) for number in (1, 2, 3)]
    for phase, rel in (("forward", 1e-6), ("backward", 1e-4)):
        first = layers[0][phase]
        assert all(layer[phase] == pytest.approx(first, rel=rel) for layer in layers)

    repeated = seconds_of(again, Scope("layer", 0, 1))
    assert repeated["recompute"] == pytest.approx(layers[0]["forward"], rel=0.03)
    assert again.chunks[0]["forward"] == pytest.approx(chunk["forward"], rel=0.02)

    assert more.micro_batches == 4
    assert more.chunks[0]["forward"] == pytest.approx(chunk["forward"], rel=0.02)
    assert more.optimizer_seconds == pytest.approx(plain.optimizer_seconds)


def test_exposed_tensor_parallel_time_is_that_of_its_collectives(steps: Any) -> None:
    step = steps["plain"]
    cluster = load_cluster("generic")
    forward = [
        one
        for one in step.intervals
        if one.kind == "communication"
        and one.communication.description == TENSOR
        and one.phase == "forward"
        and one.scope.what == "layer"
    ]
    assert len(forward) == 2 * 3 * 4  # micro-batches, layers
    expected = sum(cluster.communication_seconds(one.communication) for one in forward)
    assert sum(one.seconds for one in forward) == pytest.approx(expected)
    waited = [
        one
        for one in step.intervals
        if one.kind == "wait" and one.scope.what == "layer" and one.phase == "forward"
    ]
    assert sum(one.seconds for one in waited) == pytest.approx(expected)  # nothing hides it


def test_reductions_that_overlap_are_hidden(steps: Any) -> None:
    late, hidden = steps["late"], steps["hidden"]
    assert hidden.exposed[DATA] < late.exposed[DATA]
    assert hidden.chunks[0]["forward"] == pytest.approx(late.chunks[0]["forward"])


@pytest.mark.parametrize("nbytes", [4, 1 << 24])
def test_computation_is_slower_while_communication_runs(ranks: Any, nbytes: int) -> None:
    alone, beside, sent = ranks(2, timed_jobs.overlapped, 1.5, nbytes, setup=SETUP)[0]
    if nbytes > 4:
        assert sent > 1.5 * alone
        assert beside == pytest.approx(1.5 * alone)
    else:  # in the time of the all-reduce two thirds of its length are computed
        assert alone > sent / 1.5
        assert beside == pytest.approx(sent + alone - sent / 1.5)
