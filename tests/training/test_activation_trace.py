"""The dry run's table of activations has the bytes that real ranks keep."""

from __future__ import annotations

import pytest

from mindspeed.training.activation_trace import OUTSIDE
from tests.support.trainer_job import SETUP
from tests.training import activation_trace_job as jobs

TE = "--transformer-impl transformer_engine"
CASES = {
    "local": (1, ""),
    "te-bf16": (1, f"{TE} --bf16"),
    "full-recompute": (
        1,
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    ),
    "recompute-communication": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 "
        "--optimize-recomp-communication-level 2",
    ),
    "activation-function-and-norms": (1, f"{TE} --recompute-activation-function --recompute-norm"),
    "tensor-parallel": (2, f"{TE} --bf16 --tensor-model-parallel-size 2 --sequence-parallel"),
    "virtual-pipeline": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "uneven-pipeline": (
        2,
        "--pipeline-model-parallel-size 2 --num-layer-list 1,3",
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_bytes_by_site_are_those_of_real_ranks(ranks, name):
    world, flags = CASES[name]
    ((stages),) = ranks(
        1, jobs.traced, flags.split(), world, setup=SETUP, backend=None, timeout=200
    )
    real = dict(
        ranks(world, jobs.kept, flags.split(), world, setup=SETUP, backend=None, timeout=200)
    )
    assert {number for number, *_ in stages} == real.keys()
    for number, chunks, _ in stages:
        assert chunks == real[number]
        assert sum(sum(sites.values()) for sites, *_ in chunks) > 100_000
        assert all(len(sites) > 3 or "recompute" in flags for sites, *_ in chunks)
    assert OUTSIDE in stages[-1][1][-1][0]


def test_dry_run_prints_each_site_of_each_stage(ranks):
    flags = f"{TE} --bf16 --pipeline-model-parallel-size 2".split()
    (text,) = ranks(1, jobs.described, flags, setup=SETUP, backend=None, timeout=100)
    rows = {line[:36].strip(): line[36:].split() for line in text.splitlines()}
    assert "# MiB that one micro-batch keeps for backward, by site" in text
    tokens, ffn = 2 * 64, 176
    inputs_of_fc2 = 2 * 2 * tokens * ffn / 2**20  # layers, bytes
    assert rows["mlp.linear_fc2"] == [f"{inputs_of_fc2:.3f}"] * 2
    first, last = map(float, rows["total"])
    assert list(map(float, rows["all micro-batches in flight"])) == [2 * first, last]
    assert last - first > 4 * tokens * 1000 / 2**20 - 0.1  # fp32 logits


def test_what_a_schedule_recomputes_is_counted_where_it_is_stored(ranks):
    """Interleaved 1F1B stores 5 of 2 chunks on the first of 2 ranks, in-bubble recomputation 4."""
    flags = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    flags += " --micro-batch-size 1"
    options = {"setup": SETUP, "backend": None, "timeout": 100}
    (plain,) = ranks(1, jobs.traced, flags.split(), 2, **options)
    (found,) = ranks(1, jobs.traced, [*flags.split(), "--recompute-in-bubble"], 2, **options)
    (_, chunks, most), (_, same, fewer) = plain[0], found[0]
    assert chunks == same
    stored = [sum(sites.values()) for sites, *_ in chunks]
    assert most == max(3 * stored[0] + 2 * stored[1], 4 * stored[0] + stored[1])
    assert 2 * sum(stored) <= fewer < most


def test_dry_run_says_what_cannot_be_traced(ranks):
    flags = [
        "--num-experts",
        "4",
        "--moe-router-topk",
        "2",
        "--moe-token-dispatcher-type",
        "alltoall",
    ]
    (text,) = ranks(1, jobs.described, flags, setup=SETUP, backend=None, timeout=100)
    assert "not traced: shapes of routed experts depend on values" in text
