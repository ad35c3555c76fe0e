"""Pairs of a forward and a backward: the planner's time is that of the pipeline's clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.planner.test_trace import APART, MODEL
from tests.support.lazy import needs

needs("megatron.core")

STEPS = [
    ("interleaved", 4, 16, 0.5, 60.5),
    ("interleaved", 8, 32, 0.75, 133.75),
    ("dualpipev", 8, 32, 0.5, 122.5),
    ("dualpipev", 8, 32, 0.75, 138.5625),
    ("zb-v", 8, 32, 0.5, 122),
    ("nanopipe", 8, 32, 0.5, 122.5),
]


@pytest.mark.parametrize(("kind", "ranks", "m", "x", "expected"), STEPS)
@pytest.mark.parametrize("again", [False, True], ids=["", "level0"])
def test_a_step_takes_what_the_clock_of_pipelines_says(kind, ranks, m, x, expected, again):
    from mindspeed.pipeline.schedule.costs import Costs
    from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
    from mindspeed.pipeline.schedule.simulate import simulate
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.time.prediction import stage_costs
    from mindspeed.planner.time.step_plan import step_plan

    clock = Costs(exchange=x, layers=8, rows_again=again)
    request = ScheduleRequest(kind=kind, costs=clock, pairs=True)
    shape = shaped(request, ranks, m, again)
    half = {"F": 0.5, "I": 0.5, "W": 0.5, "B": 1.0, "exchange": x / 2}
    costs = stage_costs([half] * (2 * ranks), shape, load_cluster("h100"))
    found = step_plan(shape, costs)
    whole = simulate(build_plan(request, ranks, 2, m), clock)
    if again:  # a backward alone waits for its rows in the seconds of its weight gradients
        assert found.seconds == pytest.approx(whole.makespan, rel=0.02)
        return
    assert whole.makespan == pytest.approx(expected)
    assert found.seconds == pytest.approx(expected, rel=1e-4)  # messages have a latency
    assert found.bubble == pytest.approx(whole.bubble, abs=1e-4)


JOB = (
    f"{MODEL} {APART} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 "
    "--transformer-impl transformer_engine "
)
EIGHT = "--num-layers 8 --global-batch-size 16 --pipeline-model-parallel-size 2 "
WAYS = {
    "no pipeline": (4, "--num-layers 3 --global-batch-size 8 "),
    "combined": (8, EIGHT + "--num-layers-per-virtual-pipeline-stage 2 "),
    "dualpipev": (8, EIGHT + "--schedules-method dualpipev "),
}


def predicted(flags: str, devices: int, gbytes: float) -> Any:
    """Of a job whose links have so many gigabytes in a second."""
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.count.check import Check, RankCheck
    from mindspeed.planner.job import Job
    from mindspeed.planner.shape import shape_of
    from mindspeed.planner.time.whole_ranks import predict_whole

    cluster = load_cluster("h100")
    levels = [replace(one, gbs=gbytes) for one in cluster.levels]
    cluster = replace(cluster, levels=tuple(levels))
    args = Job(f"{JOB} {flags}".split()).settings({}, devices).args
    count = shape_of(args).micro_batches
    rows = tuple(RankCheck((rank,), 1, {}, 1, {}, 10, 0, ()) for rank in range(devices // 4))
    return predict_whole(args, Check(count, rows), cluster)


@pytest.mark.weekly_cases("combined", "dualpipev")
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("imported_ahead")
def test_pairs_hide_what_experts_send(way):
    from mindspeed.planner import isolated

    devices, flags = WAYS[way]
    plain = isolated.call(predicted, flags, devices, 5.0)
    pairs = isolated.call(predicted, flags + "--moe-fb-overlap", devices, 5.0)
    group = "EXPERT_MODEL_PARALLEL_GROUP"
    hidden = plain.exposed[group] - pairs.exposed[group]
    assert hidden > 0.5 * plain.exposed[group]
    # A pair hands its forward on when both are done, so a short step may wait longer for its ranks.
    busy, busy_in_pairs = (
        one.seconds - one.parts["bubble of the pipeline"] for one in (plain, pairs)
    )
    assert busy_in_pairs < busy - 0.5 * hidden
    assert min(pairs.parts.values()) >= 0
    assert sum(pairs.parts.values()) == pytest.approx(pairs.seconds)


def test_a_search_counts_pairs_of_a_pipeline_where_the_job_asks_for_them():
    from types import SimpleNamespace

    from mindspeed.pipeline.schedule.schedules import ScheduleRequest
    from mindspeed.planner.search.evaluator import counted_whole

    shape = shaped(ScheduleRequest("interleaved", pairs=True), 4, 16, again=False)
    assert counted_whole(shape, SimpleNamespace(expert_program=None))
    assert not counted_whole(shape, SimpleNamespace(expert_program="fb-overlap"))
    assert not counted_whole(
        replace(shape, whole_only="else"), SimpleNamespace(expert_program=None)
    )
    assert counted_whole(replace(shape, ranks=1), SimpleNamespace(expert_program="fb-overlap"))


def test_a_search_composes_pairs_of_a_pipeline_where_the_job_asks_for_them():
    from types import SimpleNamespace

    from mindspeed.pipeline.schedule.schedules import ScheduleRequest
    from mindspeed.planner.search.evaluator import is_dear

    pairs = shaped(ScheduleRequest("dualpipev", pairs=True), 4, 16, again=False)
    plain = shaped(ScheduleRequest("dualpipev"), 4, 16, again=False)
    of_job, of_search = (SimpleNamespace(expert_program=x) for x in (None, "fb-overlap"))
    assert is_dear(pairs, of_search)
    assert not is_dear(pairs, of_job)
    assert not is_dear(plain, of_search)
    assert not is_dear(replace(pairs, ranks=1), of_search)


def shaped(request, ranks, m, again):
    """A job of stages with four layers of experts each."""
    from mindspeed.planner.shape import PAIRS, Shape

    return Shape(
        request=request,
        ranks=ranks,
        chunks=2,
        stages=(("expert",) * 4,) * (2 * ranks),
        micro_batches=m,
        data_parallel=1,
        devices=ranks,
        tensor=1,
        context=1,
        expert=1,
        expert_tensor=1,
        message=0,
        overlap_messages=False,
        overlap_gradients=False,
        overlap_parameters=False,
        distributed_optimizer=False,
        model_flops=1.0,
        tokens=1,
        whole_only=PAIRS,
        rows_again=again,
    )
