"""Composed figures are those of whole jobs, counted rank by rank."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.planner import planner_doors
from tests.support.lazy import Lazy

check = Lazy("mindspeed.planner.counted.check")
clusters = Lazy("mindspeed.planner.cluster")
composed = Lazy("mindspeed.planner.composed.compose")
keys = Lazy("mindspeed.planner.composed.figures")
isolated = Lazy("mindspeed.planner.isolated")
layouts = Lazy("mindspeed.planner.layout")
shapes = Lazy("mindspeed.planner.shape")
TOLERANCE = 0.001

MODEL = (
    "--hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --num-query-groups 4 "
    "--group-query-attention --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --vocab-size 8192 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel "
)
APART = "--untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer "
FOUR = APART + "--num-layers 8 --pipeline-model-parallel-size 4 "
ONE = APART + "--num-layers 4 "
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--expert-model-parallel-size 2 --transformer-impl transformer_engine "
)
CASES = {
    "uneven stages": (32, 24, FOUR + "--num-layer-list 3,1,2,2"),
    "interleaved": (32, 32, FOUR + "--num-virtual-stages-per-pipeline-rank 2"),
    "zb-h1": (32, 24, FOUR + "--pipeline-schedule zb-h1"),
    "experts after a dense layer": (8, 8, ONE + EXPERTS + "--moe-layer-freq [0,1,1,1]"),
    "context, core attention again, one copy of weights": (
        16,
        8,
        ONE + "--context-parallel-size 2 --use-flash-attn --context-parallel-algo ulysses_cp_algo "
        "--recompute-granularity selective --reuse-fp32-param",
    ),
    "tied, prediction layer, no-op layer": (
        8,
        8,
        "--fp16 --use-distributed-optimizer --num-layers 4 --mtp-num-layers 1 --noop-layers 1",
    ),
}
"""Name -> ranks, samples of a step, flags."""
STAGES = {"uneven stages": (0, 3), "interleaved": (3,)}
"""Pipeline ranks that are counted, where there are more than the first: backward of the first rank
of zb-h1 is whole, which that of the stage is not from which layers are measured."""


class Known:
    """Runs by the command lines of their jobs, which share them.

    Args:
        job: whose runs these are.
        runs: of all jobs.
    """

    def __init__(self, job: Any, runs: dict[Any, Any]) -> None:
        self._job, self._runs = job, runs

    def _key(self, point: Any) -> Any:
        return tuple(self._job.flags(point.overrides)), point.devices, point.stage

    def get(self, point: Any) -> Any:
        """The run of a point."""
        return self._runs.get(self._key(point))

    def put(self, point: Any, run: Any) -> None:
        """Keep a run."""
        self._runs[self._key(point)] = run


@pytest.fixture(scope="module")
def runs():
    """Runs of all jobs of this file."""
    import mindspeed.megatron_adaptor  # noqa: F401 - before megatron.core

    return {}


def job_of(name: str) -> tuple[Any, int]:
    """A job and its ranks."""
    from mindspeed.planner.job import Job

    devices, batch, flags = CASES[name]
    return Job(f"{MODEL} {flags} --global-batch-size {batch}".split()), devices


def signature_of(name: str, runs: dict[Any, Any]) -> tuple[Any, Any]:
    """What is composed, and the shape of the whole job."""
    from mindspeed.planner.composed.measurement import measure

    def described() -> Any:
        args = job.settings({}, devices).args
        layout = layouts.layout_of(args)
        return layout, shapes.shape_of(args), composed.describes(job, layout, args)

    job, devices = job_of(name)
    layout, shape, described = isolated.call(described)
    assert described and not shape.uncomposable
    return measure(job, layout, clusters.load_cluster("h100"), runs=Known(job, runs)), shape


def whole(job: Any, devices: int, stage: int) -> Any:
    """Figures of a pipeline rank of the whole job."""
    from mindspeed.planner.composed.tiny_run import first_may_be_short
    from mindspeed.planner.counted.counted_step import count_step
    from mindspeed.training.fake_job import rank_in_stage

    args = job.settings({}, devices).args
    step = count_step(args, rank_in_stage(args, stage), short=first_may_be_short(args))
    return check.figures_of_step(stage, step)


def seconds(job: Any, devices: int, stage: int) -> Any:
    """Of a forward and a backward of a pipeline rank of the whole job."""
    from mindspeed.planner.counted.timed_step import time_step
    from mindspeed.training.fake_job import rank_in_stage

    args = job.settings({}, devices).args
    cluster = clusters.load_cluster("h100")
    found = time_step(args, cluster, rank_in_stage(args, stage), micro_batches=4)
    return found.chunks[0].forward, found.chunks[0].backward + found.chunks[0].recompute


def figures(found: Any) -> dict[str, float]:
    """What is compared, by name; groups of data-parallel ranks by what they share."""
    sums: dict[str, float] = defaultdict(float)
    for name in ("parameters", "peak", "flops", "recomputed"):
        sums[name] = getattr(found, name)
    sums["static"] = sum(found.static.values())
    for row in found.traffic:
        group, what = row.group, ("calls", "payload", "wire")
        if "DATA_PARALLEL" in group:  # calls depend on the sizes of buckets
            group, what = "experts" if "EXPERT" in group else "dense", ("payload", "wire")
        for name in what:
            sums[f"{name} {group}|{row.size}|{row.op}"] += getattr(row, name)
    return dict(sums)


@pytest.mark.slow
def test_composed_seconds_are_those_of_the_whole_job(runs):
    """Within 3 %: in a job this small the device waits for its host, and less behind the head."""
    job, devices = job_of("uneven stages")
    signature, shape = signature_of("uneven stages", runs)
    forward, backward = isolated.call(seconds, job, devices, 3)
    chunk = signature.chunk("last", shape.stages[3])
    names = [keys.Figure(keys.Quantity.SECONDS, op) for op in "FB"]
    assert [chunk[name] for name in names] == pytest.approx([forward, backward], rel=0.03)


@pytest.mark.weekly_cases("zb-h1", "context, *", "interleaved")
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_composed_figures_are_those_of_the_whole_job(name, runs):
    job, devices = job_of(name)
    signature, shape = signature_of(name, runs)
    ranks = composed.ranks_of(signature, shape)
    assert signature.error_at(max(rank.peak for rank in ranks)) <= TOLERANCE
    for stage in STAGES.get(name, (0,)):
        expected = figures(isolated.call(whole, job, devices, stage))
        found = figures(ranks[stage])
        far = {
            name: (found.get(name, 0.0), expected.get(name, 0.0))
            for name in found.keys() | expected.keys()
            if found.get(name, 0.0) != pytest.approx(expected.get(name, 0.0), rel=1e-3, abs=100)
        }
        assert not far


@pytest.mark.slow
def test_megatrons_index_helpers_need_not_be_built(ranks: Any) -> None:
    """A fresh checkout of Megatron-LM builds them when it trains."""
    assert ranks(1, planner_doors.without_helpers, backend=None) == [True]


def test_the_adaptor_comes_before_megatron_whichever_module_is_first(ranks: Any) -> None:
    (found,) = ranks(1, planner_doors.doors, backend=None)
    modules = ("job", "scripts", "composed.signature", "composed.whole_ranks", "search.evaluator")
    assert {f"mindspeed.planner.{name}" for name in modules} <= found.keys()
    assert all(found.values()), [name for name, before in found.items() if not before]
