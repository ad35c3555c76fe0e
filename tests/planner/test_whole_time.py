"""Times of jobs that are counted whole: those of their whole steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planner.test_trace import APART, MODEL

MICRO_BATCHES = 6
JOBS = {
    "no pipeline": f"{APART} --num-layers 2",
    "weights gathered layer by layer": (
        f"{APART} --num-layers 2 --zero-stage 3 --use-flash-attn --transformer-impl "
        "transformer_engine --no-gradient-accumulation-fusion"
    ),
    "pipeline": f"{APART} --num-layers 2 --pipeline-model-parallel-size 2",
}


def predicted(flags: str) -> tuple[Any, Any, float]:
    """Of a job on eight ranks: whole prediction, composed one of a pipeline, step on the clock."""
    from mindspeed.planner import isolated
    from mindspeed.planner.cluster import load_cluster
    from mindspeed.planner.compose.compose import compose
    from mindspeed.planner.count.check import Check, RankCheck
    from mindspeed.planner.count.timed_step import time_step
    from mindspeed.planner.job import Job
    from mindspeed.planner.time.whole_ranks import predict_whole

    cluster = load_cluster("h100")
    ranks = 2 if "pipeline" in flags else 1
    batch = MICRO_BATCHES * 8 // 2 // ranks
    job = Job(f"{MODEL} {flags} --global-batch-size {batch}".split())
    args = job.settings({}, 8).args
    found = compose(job, args, cluster) if ranks > 1 else None
    rows = tuple(RankCheck((rank,), 1, {}, 1, {}, 10, 0, ()) for rank in range(ranks))
    whole = predict_whole(args, Check(MICRO_BATCHES, rows), cluster)
    step = isolated.call(lambda: time_step(args, cluster).seconds)
    return whole, found and found.prediction, step


@pytest.fixture(params=JOBS)
def job(request, imported_ahead):
    """Name and predictions of a job."""
    from mindspeed.planner import isolated

    return request.param, *isolated.call(predicted, JOBS[request.param])


@pytest.mark.weekly_cases("no pipeline", "pipeline")  # the row of gathered weights has none either
@pytest.mark.slow
def test_a_step_takes_what_its_ranks_take_in_the_schedule(job):
    name, whole, composed, step = job
    if name == "pipeline":  # of which the clock of a rank does not know the bubble
        assert whole.seconds == pytest.approx(composed.seconds, rel=0.01)
        assert whole.bubble == pytest.approx(composed.bubble, rel=0.01)
        assert whole.mfu == pytest.approx(composed.mfu, rel=0.01)
        for what in composed.exposed:
            assert whole.exposed.get(what, 0.0) == pytest.approx(
                composed.exposed[what], rel=0.02, abs=0.002 * whole.seconds
            )
    else:
        assert whole.seconds == pytest.approx(step, rel=0.002)
    assert whole.flops_per_device == 10
    assert sum(whole.exposed.values()) < whole.seconds
