"""Spliced figures are those of whole jobs, counted rank by rank."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.planner import planner_doors
from tests.planner.random_jobs import draw
from tests.support.lazy import Lazy

price = Lazy("mindspeed.planner.time.price")
spliced = Lazy("mindspeed.planner.compose.job")
check = Lazy("mindspeed.planner.count.check")
clusters = Lazy("mindspeed.planner.cluster")
composed = Lazy("mindspeed.planner.compose.compose")
coverings = Lazy("mindspeed.planner.compose.covering")
isolated = Lazy("mindspeed.planner.isolated")
layouts = Lazy("mindspeed.planner.layout")
shapes = Lazy("mindspeed.planner.shape")
SEEDS = (0, 53)
"""Seeds of the jobs that are drawn; the peak of 53 is the optimizer's step, of padded shards."""

MODEL = (
    "--hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --num-query-groups 4 "
    "--group-query-attention --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --vocab-size 8192 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel "
)
APART = "--untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer "
FOUR = APART + "--num-layers 8 --pipeline-model-parallel-size 4 "
EIGHT = APART + "--pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 2 "
V = "--num-layers 16 --pipeline-model-parallel-size 4 --pipeline-schedule zb-v"
ONE = APART + "--num-layers 4 "
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--expert-model-parallel-size 2 --transformer-impl transformer_engine "
)
PAIRED = (
    f"{APART}{EXPERTS}--tensor-model-parallel-size 1 --moe-fb-overlap "
    "--pipeline-schedule dualpipev --pipeline-model-parallel-size "
)
SHORT_PAIRS = f"{PAIRED}2 --num-layers 8 --pipeline-model-parallel-layout Et|ttt|ttt|tL"
PAIRS = f"{PAIRED}2 --num-layers 12 --pipeline-model-parallel-layout Ett|tttt|tttt|ttL"
CASES = {
    "uneven stages": (32, 24, FOUR + "--num-layer-list 3,1,2,2"),
    "equal stages": (24, 24, APART + "--num-layers 24 --pipeline-model-parallel-size 6"),
    "interleaved": (32, 32, FOUR + "--num-virtual-stages-per-pipeline-rank 2"),
    "three chunks, ring": (
        32,
        48,
        APART + "--num-layers 12 --pipeline-model-parallel-size 4 "
        "--num-virtual-stages-per-pipeline-rank 3 --context-parallel-size 2 "
        "--context-parallel-algo megatron_cp_algo --use-flash-attn --attention-dropout 0",
    ),
    "interleaved experts": (
        32,
        32,
        EIGHT + EXPERTS + "--num-layers 16 --moe-shared-expert-intermediate-size 512",
    ),
    "interleaved experts, computed again": (
        32,
        32,
        EIGHT + EXPERTS + "--num-layers 32 --moe-layer-freq [0]*3+[1]*29 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "zb-v experts": (16, 24, APART + EXPERTS + V),
    "pairs of a V": (4, 24, SHORT_PAIRS),
    "pairs of a V, longer stages": (4, 24, PAIRS),
    "pairs of a V, its ends": (4, 24, PAIRS),
    "pairs of a V, four ranks": (8, 80, f"{PAIRED}4 --num-layers 16"),
    "zb-h1": (32, 24, FOUR + "--pipeline-schedule zb-h1"),
    "experts after a dense layer": (8, 8, ONE + EXPERTS + "--moe-layer-freq [0,1,1,1]"),
    "experts in mxfp8": (
        16,
        16,
        f"{APART}{EXPERTS}--num-layers 32 --tensor-model-parallel-size 1 "
        "--pipeline-model-parallel-size 4 --fp8-format e4m3 --fp8-recipe mxfp8",
    ),
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
    "weights in shards, two micro-batches": (
        4,
        4,
        "--bf16 --num-layers 8 --untie-embeddings-and-output-weights --zero-stage 3",
    ),
}
"""Name -> ranks, samples of a step, flags."""
STAGES = {
    "three chunks, ring": (1,),
    "uneven stages": (0, 3),
    "equal stages": (1, 4),
    "pairs of a V": (1,),
    "pairs of a V, longer stages": (1,),
    "pairs of a V, four ranks": (1,),
    "experts in mxfp8": (1,),
    "interleaved": (3,),
    "interleaved experts": (2, 7),
    "interleaved experts, computed again": (1,),
}
"""Pipeline ranks that are counted, where there are more than the first: backward of the first rank
of zb-h1 is whole, which that of the stage is not from which layers are measured."""


def job_of(name: str) -> tuple[Any, int]:
    """A job and its ranks."""
    from mindspeed.planner.job import Job

    devices, batch, flags = CASES[name]
    return Job(f"{MODEL} {flags} --global-batch-size {batch}".split()), devices


def traced(name: str, cluster: Any = None, ranks: Any = None) -> tuple[Any, Any]:
    """Traces of ranks of a job, and the shape of the whole job."""

    def described() -> Any:
        args = job.settings({}, devices).args
        layout = layouts.layout_of(args)
        return layout, shapes.shape_of(args), composed.describes(job, layout, args)

    job, devices = job_of(name)
    layout, shape, described = isolated.call(described)
    assert described and not shape.unspliceable
    return spliced.Tracer(job, cluster).exact(layout, shape, ranks), shape


def shape_in(job: Any, devices: int) -> Any:
    """Layout and shape of a job; changes the state of this process."""
    args = job.settings({}, devices).args
    return layouts.layout_of(args), shapes.shape_of(args)


def whole(job: Any, devices: int, stage: int) -> Any:
    """Figures of a pipeline rank of the whole job."""
    from mindspeed.planner.count.counted_step import count_step
    from mindspeed.planner.count.recorder import first_may_be_short
    from mindspeed.training.fake_job import rank_in_stage

    args = job.settings({}, devices).args
    step = count_step(args, rank_in_stage(args, stage), short=first_may_be_short(args))
    return check.figures_of_step(stage, step)


def seconds(job: Any, devices: int, stage: int) -> Any:
    """Of a forward and a backward of a pipeline rank of the whole job."""
    from mindspeed.planner.count.timed_step import time_step
    from mindspeed.training.fake_job import rank_in_stage

    args = job.settings({}, devices).args
    cluster = clusters.load_cluster("h100")
    found = time_step(args, cluster, rank_in_stage(args, stage), micro_batches=4)
    chunk = found.chunks[0]
    return chunk["forward"], chunk["backward"] + chunk["recompute"]


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
@pytest.mark.usefixtures("imported_ahead")
def test_spliced_seconds_are_those_of_the_whole_job():
    job, devices = job_of("uneven stages")
    (found,), _ = traced("uneven stages", clusters.load_cluster("h100"), [3])
    expected = isolated.call(seconds, job, devices, 3)
    forward, backward = (found.step.seconds[op, 0] for op in "FB")
    assert forward + backward == pytest.approx(sum(expected), rel=0.002)
    # Where one ends is a matter of the host, which runs ahead of the device.
    assert [forward, backward] == pytest.approx(expected, rel=0.03)


# What is computed again, and dense layers before experts, are in other rows and in test_walked.py;
# experts and several chunks in the rows of each, and together in pairs.
@pytest.mark.weekly_cases(
    *("zb-h1", "context, *", "interleaved experts*", "zb-v experts", "pairs of a V, *", "*mxfp8")
)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("imported_ahead")
def test_spliced_figures_are_those_of_the_whole_job(name, monkeypatch):
    from mindspeed.planner.compose import job as tracing

    monkeypatch.setattr(tracing, "WAYS", [coverings.Layers.SHORT])  # never the whole row
    job, devices = job_of(name)
    stages = STAGES.get(name, (0,))
    traces, shape = traced(name, ranks=stages)
    for stage, one in zip(stages, traces, strict=True):
        real = isolated.call(whole, job, devices, stage)
        found = price.rank_check(stage, one, shape)
        assert (found.peak, found.static, found.at_peak) == (real.peak, real.static, real.at_peak)
        assert (found.flops, found.recomputed) == (real.flops, real.recomputed)
        assert (found.parameters, found.host) == (real.parameters, real.host)
        sent, expected = figures(found), figures(real)
        assert sent.keys() == expected.keys()
        assert sent == pytest.approx(expected, rel=1e-3, abs=100)


@pytest.mark.slow
@pytest.mark.usefixtures("imported_ahead")
def test_layers_keep_between_steps_what_is_of_the_last_micro_batch():
    from dataclasses import replace

    from mindspeed.planner.count.recorder import record

    job, devices = job_of("interleaved experts, computed again")
    layout, shape = isolated.call(shape_in, job, devices)
    (cover,) = coverings.covering(layout, shape, [1])
    late = cover.source.point
    assert not late.step
    points = late, replace(late, step=True), replace(late, bare=True)
    found, real, bare = (isolated.call(record, job, point).static for point in points)
    assert found == real
    assert found != bare


@pytest.mark.slow
@pytest.mark.usefixtures("imported_ahead")
def test_messages_do_not_depend_on_the_time_that_bare_layers_take():
    """With a clock, actions of bare layers take no time; the messages are where they are sent."""

    def messages(cluster: Any) -> dict[Any, Any]:
        ((found,), _) = traced("interleaved", cluster, [1])
        sent = found.step.sent.items()
        return {name: list(map(round, x[:3])) for name, x in sent if name.op and not name.shared}

    found = messages(None)
    assert any(name.group.startswith("PIPELINE") for name in found)
    assert messages(clusters.load_cluster("h100")) == found


@pytest.mark.slow
@pytest.mark.usefixtures("imported_ahead")
def test_prices_of_a_search_are_those_of_traces_at_the_own_size():
    from dataclasses import replace

    from mindspeed.planner.count.cache import RunCache
    from mindspeed.planner.search.evaluator import JobEvaluator

    job, devices = job_of("equal stages")
    args = isolated.call(lambda: job.settings({}, devices).args)
    cluster = clusters.load_cluster("h100")
    runs = RunCache(None, job, cluster)
    evaluator = JobEvaluator(job, args, cluster, runs)
    few = layouts.layout_of(args)
    evaluator.measure(few)
    for layout in (few, replace(few, devices=4 * devices, global_batch_size=96)):
        missing = runs.misses
        found = evaluator.price(layout)
        assert runs.misses == missing  # of the same recordings
        own = evaluator.exact(layout)
        same = [one.peak for one in found.ranks] == [one.peak for one in own.ranks]
        assert same or layout is not few
        assert found.peak_bytes == pytest.approx(own.peak_bytes, rel=1e-3)  # of paddings
        assert found.seconds == pytest.approx(own.seconds, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("imported_ahead")
def test_spliced_bytes_are_those_of_a_job_drawn_by_chance(seed):
    from mindspeed.planner.job import Job

    drawn = draw(seed)
    job = Job(drawn.flags.split())
    layout, shape = isolated.call(shape_in, job, drawn.devices)
    (found,) = spliced.Tracer(job).exact(layout, shape, [drawn.stage])
    real = isolated.call(whole, job, drawn.devices, drawn.stage)
    assert (found.peak, found.step.flops) == (real.peak, real.flops), f"seed {seed}: {drawn.flags}"


@pytest.mark.slow
def test_megatrons_index_helpers_need_not_be_built(ranks: Any) -> None:
    """A fresh checkout of Megatron-LM builds them when it trains."""
    assert ranks(1, planner_doors.without_helpers, backend=None) == [True]


def test_the_adaptor_comes_before_megatron_whichever_module_is_first(ranks: Any) -> None:
    # In a server of its own: another test's module may have brought Megatron into the common one.
    alone = "tests.planner.planner_doors"
    (found,) = ranks(1, planner_doors.doors, backend=None, setup=alone)
    modules = ("job", "scripts", "compose.job", "search.evaluator")
    assert {f"mindspeed.planner.{name}" for name in modules} <= found.keys()
    assert all(found.values()), [name for name, before in found.items() if not before]
