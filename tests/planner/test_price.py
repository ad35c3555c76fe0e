"""Times of steps whose sums are known in closed form, and shapes."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.planner.cluster import load_cluster
from tests.support.lazy import Lazy

groups = Lazy("mindspeed.planner.time.step_plan")
layouts = Lazy("mindspeed.planner.layout")
predict = Lazy("mindspeed.planner.time.price", "predict")
ranks = Lazy("mindspeed.planner.compose.rank")
recordings = Lazy("mindspeed.planner.count.recording")
reshaped = Lazy("mindspeed.planner.search.evaluator", "reshaped")
Shape = Lazy("mindspeed.planner.shape", "Shape")
Spliced = Lazy("mindspeed.planner.compose.splice", "Spliced")
whole_only = Lazy("mindspeed.planner.shape", "whole_only")

FORWARD, BACKWARD = 1.0, 2.0
"""Seconds of a layer."""


def traces(
    shape: Any, head: float = 0.0, static: float = 0.0, shared: Any = None, parameters: int = 0
) -> list[Any]:
    """Ranks whose chunks take the seconds of their layers; the last one also those of a head."""
    found, last = [], len(shape.stages) - 1
    for stages in shape.placement.stages:
        seconds = {}
        for chunk, stage in enumerate(stages):
            layers, more = len(shape.stages[stage]), head * (stage == last)
            seconds["F", chunk] = layers * FORWARD + more
            seconds["B", chunk] = layers * BACKWARD + 2 * more
        step = Spliced(seconds=seconds)
        found.append(ranks.RankTrace(Counter(weights=static), parameters, 0, step, shared or {}))
    return found


def sent(**payloads: float) -> Any:
    """Communications of two data-parallel ranks by operation."""
    group = "DATA_PARALLEL_GROUP"
    return {
        recordings.Message(group, 2, op): recordings.Traffic(1, payload, payload)
        for op, payload in payloads.items()
    }


def shape(count: int, layers: int, batches: int, chunks: int = 1, **changes: object) -> Any:
    """Layers spread evenly, one device a rank."""
    stages = count * chunks
    kind = "interleaved" if chunks > 1 else "1f1b"
    found = Shape(
        request=ScheduleRequest(kind),
        ranks=count,
        chunks=chunks,
        stages=(("dense",) * (layers // stages),) * stages,
        micro_batches=batches,
        data_parallel=2,
        devices=2 * count,
        tensor=1,
        context=1,
        expert=1,
        expert_tensor=1,
        message=0,
        overlap_messages=chunks > 1,
        overlap_gradients=False,
        overlap_parameters=False,
        distributed_optimizer=True,
        model_flops=1e12,
        tokens=1024,
    )
    return replace(found, **changes)


@pytest.fixture(scope="module")
def free_messages():
    """A cluster whose messages take no time."""
    cluster = load_cluster("h100")
    levels = tuple(replace(level, latency_us=0.0) for level in cluster.levels)
    return replace(cluster, levels=levels, collective_us=0.0)


@pytest.mark.parametrize("batches", [4, 12, 4001])
def test_seconds_of_1f1b_are_those_of_the_formula(batches, free_messages):
    """(m + p - 1) (tF + tB), with equal stages; long steps are continued from short ones."""
    one = shape(4, 8, batches)
    found = predict(traces(one), one, free_messages)
    assert found.seconds == pytest.approx((batches + 3) * 2 * (1.0 + 2.0))
    assert found.bubble == pytest.approx(3 / (batches + 3))


@pytest.mark.parametrize(("ranks", "batches"), [(3, 1001), (4, 803), (6, 502)])
def test_long_steps_with_latency_are_those_of_the_whole_schedule(ranks, batches, monkeypatch):
    """1F1B with messages that take time repeats every p micro-batches, not every one."""
    from mindspeed.planner.time import step_plan

    cluster = load_cluster("h100")
    job = shape(ranks, ranks, batches, message=1 << 30, overlap_messages=True)
    short = predict(traces(job), job, cluster)
    monkeypatch.setattr(step_plan, "MOST_ACTIONS", 1 << 60)
    whole = predict(traces(job), job, cluster)
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-12)
    assert short.bubble == pytest.approx(whole.bubble, rel=1e-9)


def test_seconds_of_the_interleaved_schedule(free_messages):
    one = shape(4, 16, 16, 2)
    found = predict(traces(one), one, free_messages)
    assert found.seconds == pytest.approx((16 + 3 / 2) * 4 * 3.0)


def test_a_heavy_head_slows_every_micro_batch(free_messages):
    one = shape(4, 8, 100)
    found = predict(traces(one, head=0.5), one, free_messages)
    light = predict(traces(one), one, free_messages)
    # The last stage takes 7.5 instead of 6 seconds; the others wait for it.
    assert found.seconds - light.seconds == pytest.approx(100 * 1.5)
    assert found.limit == "compute"


def test_messages_that_block_lengthen_the_stages_between(free_messages):
    slow = load_cluster("h100")
    message = slow.collective_seconds("send", 1 << 30, (0, 2))
    one = shape(4, 8, 64, message=1 << 30)
    found = predict(traces(one), one, slow)
    assert found.seconds == pytest.approx((64 + 3) * 6 + 2 * message * (64 + 2), rel=0.01)
    assert found.exposed["messages"] == pytest.approx(2 * 64 * message)


@pytest.mark.parametrize("nbytes", [80e9, 1600e9])
def test_data_parallel_reduction_hides_behind_the_last_backward(nbytes):
    """But for the last of its four buckets, which is complete when backward is."""
    cluster = load_cluster("h100")
    one = shape(2, 4, 4)
    heavy = traces(one, shared=sent(reduce_scatter=nbytes, all_gather=200e9), parameters=40)
    shown = predict(heavy, one, cluster).exposed["data parallel"]
    hidden = predict(heavy, replace(one, overlap_gradients=True, bucket=10), cluster)
    reduce = cluster.collective_seconds("reduce_scatter", nbytes, (0, 1))
    gather = cluster.collective_seconds("all_gather", 200e9, (0, 1))
    assert shown == pytest.approx(reduce + gather)
    backward = 2 * 2.0
    left = max(reduce / 4, reduce - backward) + gather
    assert hidden.exposed["data parallel"] == pytest.approx(left, rel=1e-3)


def test_one_bucket_hides_behind_nothing():
    cluster = load_cluster("h100")
    one = shape(1, 2, 4, overlap_gradients=True, bucket=100)
    found = predict(traces(one, shared=sent(reduce_scatter=8e9), parameters=40), one, cluster)
    reduce = cluster.collective_seconds("reduce_scatter", 8e9, (0, 1))
    assert found.exposed["data parallel"] == pytest.approx(reduce)


def test_every_bucket_has_its_latency():
    cluster = load_cluster("h100")
    one = shape(1, 2, 4, overlap_gradients=True, bucket=10, data_parallel=256, devices=256)
    found = predict(traces(one, shared=sent(reduce_scatter=1.0), parameters=10_000), one, cluster)
    each = cluster.collective_seconds("reduce_scatter", 0.001, range(256))
    assert found.exposed["data parallel"] == pytest.approx(each, rel=1e-3)
    light = replace(one, data_parallel=8, devices=8)
    few = predict(traces(light, shared=sent(reduce_scatter=1.0), parameters=10_000), light, cluster)
    assert few.exposed["data parallel"] < found.exposed["data parallel"] / 4


def test_later_ranks_reduce_while_the_pipeline_ends():
    """The last rank is done a backward of the first one before the end."""
    cluster = load_cluster("h100")
    one = shape(2, 4, 4)
    found = traces(one, parameters=40)
    found[1] = replace(found[1], shared=sent(reduce_scatter=4000e9))
    reduce = cluster.collective_seconds("reduce_scatter", 4000e9, (0, 1))
    backward = 2 * 2.0
    assert reduce > backward
    price = predict(found, one, cluster)
    assert price.exposed["data parallel"] == pytest.approx(reduce - backward)


def test_a_gather_hides_behind_the_next_forward():
    """But for the first of its buckets; on later ranks it hides until an activation comes."""
    cluster = load_cluster("h100")
    one = shape(2, 4, 4, overlap_parameters=True, bucket=10)
    seconds = cluster.collective_seconds("all_gather", 800e9, (0, 1))
    heavy = traces(one, shared=sent(all_gather=800e9), parameters=40)
    forward = 2 * 1.0
    assert seconds > forward
    left = max(seconds / 4, seconds - forward)
    assert predict(heavy, one, cluster).exposed["data parallel"] == pytest.approx(left, rel=1e-4)
    heavy[0] = replace(heavy[0], shared={})
    last = predict(heavy, one, cluster)
    assert last.exposed["data parallel"] == pytest.approx(seconds - forward, rel=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_mfu_is_a_part_of_the_peak_of_the_dtype(dtype):
    cluster = load_cluster("a100")
    one = shape(2, 4, 4, dtype=dtype, model_flops=1e15)
    found = predict(traces(one), one, cluster)
    peak = 1e12 * cluster.device.peak_tflops[dtype]
    assert found.mfu == pytest.approx(1e15 / (found.seconds * 4 * peak))  # on four devices


def test_what_fits():
    cluster = load_cluster("h100")
    one = shape(2, 4, 4)
    found = predict(traces(one, static=120e9), one, cluster)
    assert not found.fits and not found.ranks[0].fits
    assert found.peak_bytes == max(rank.peak for rank in found.ranks)
    assert predict(traces(one), one, cluster).fits


def test_groups_of_ranks():
    wide = shape(2, 4, 4, data_parallel=4, tensor=2, expert=4, context=1, devices=16)
    assert groups.dense_ranks(wide) == (0, 2, 4, 6)
    assert groups.expert_ranks(wide) == (0, 4)


def test_messages_at_the_end_of_a_step_are_over_the_groups_of_the_job():
    wide = shape(4, 8, 4, data_parallel=4, tensor=2, devices=32)
    assert groups.group_ranks("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", 4, wide) == tuple(
        range(32)
    )
    assert groups.group_ranks("EMBEDDING_GROUP", 2, wide) == (0, 24)
    assert groups.group_ranks("MODEL_PARALLEL_GROUP", 0, wide) == (0, 1, 8, 9, 16, 17, 24, 25)
    assert groups.group_ranks("TENSOR_MODEL_PARALLEL_GROUP", 2, wide) == (0, 1)
    cluster, found = load_cluster("h100"), traces(wide)
    embedding = recordings.Message("EMBEDDING_GROUP", 2, "all_reduce")
    found[0].step.closing = {embedding: recordings.Traffic(2, 4_000_000, 4_000_000)}
    expected = 2 * cluster.collective_seconds("all_reduce", 2e6, (0, 24))
    assert predict(found, wide, cluster).optimizer_seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"recompute": "bubble"}, "recomputation in bubble"),
        ({"recompute": "advance"}, "recomputation in advance"),
        ({"sizes": (1, 2)}, "different sizes"),
        ({"swap": True}, "on the host"),
        ({}, ""),
    ],
)
def test_schedules_that_are_only_counted_whole(changes, what):
    one = shape(2, 4, 4, request=ScheduleRequest("1f1b", **changes))
    assert what in one.unspliceable and bool(what) == bool(one.unspliceable)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"recompute_num_layers": 2}, ""),
        ({"recompute_method": "block", "recompute_num_layers": 2}, ""),
        ({"recompute_norm_num_layers": 2}, "--recompute-norm-num-layers"),
        ({"recompute_norm_num_layers": 8}, ""),
        ({"window_attn_skip_freq": [1, 0]}, "--window-attn-skip-freq"),
        ({"adaptive_recompute_device_size": -1}, ""),
        ({"adaptive_recompute_device_size": 1000}, "--adaptive-recompute-device-size"),
        ({"zero_stage": 2}, ""),
        ({"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances"),
        ({"virtual_optimizer": ("all",)}, ""),
        ({"virtual_optimizer": ("1.5",)}, "--virtual-optimizer SIZE"),
        ({"activation_plan": "{all: {input_layernorm: recompute_output}}"}, ""),
        ({"activation_plan": "{2: {input_layernorm: recompute_output}}"}, "--activation-plan"),
    ],
)
def test_jobs_that_are_only_counted_whole(changes, what, tmp_path):
    (tmp_path / "plan.yaml").write_text(str(changes.get("activation_plan")))
    if "activation_plan" in changes:
        changes = {"activation_plan": str(tmp_path / "plan.yaml")}
    values = {"recompute_granularity": "full", "recompute_method": "uniform", "num_layers": 8}
    args = SimpleNamespace(**values | {"recompute_num_layers": 1} | changes)
    found = whole_only(args)
    assert what in found and bool(what) == bool(found)


def test_a_shape_for_another_pipeline():
    request = ScheduleRequest("interleaved", group_size=4)
    base = replace(shape(4, 16, 8, 2), request=request)
    found = reshaped(base, layouts.Layout(16, 16, pp=8, vpp=2))
    assert (found.ranks, found.chunks, found.request.group_size) == (8, 2, 8)
    vee = replace(shape(4, 16, 8, 2), request=ScheduleRequest("zb-v"))
    found = reshaped(vee, layouts.Layout(16, 16, pp=2, schedule="zb-v"))
    assert (found.chunks, found.stages) == (2, (("dense",) * 4,) * 4)


def with_memory(found: Any, job: Any) -> None:
    """Let each trace keep 10 bytes from a forward to its backward, and 3 while an action runs."""
    plan = build_plan(job.request, job.ranks, job.chunks, job.micro_batches)
    for one, row in zip(found, plan.rows, strict=True):
        step, alive = one.step, 0
        actions = [action for action in row if action.microbatch is not None]
        step.row = [
            recordings.Place(a.op, plan.placement.chunk(a.stage), a.microbatch) for a in actions
        ]
        for action in actions:
            step.tops.append(alive + 13)
            alive += 10 if action.op == "F" else -10
            step.after.append(alive)
        after = list(step.after)
        step.kinds_after = lambda after=after: [Counter(activations=n) for n in after]


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_picture_has_the_actions_that_were_simulated_and_their_memory(chunks, free_messages):
    job = shape(2, 4, 4, chunks)
    found = traces(job, static=100)
    with_memory(found, job)
    price = predict(found, job, free_messages, drawn=True)
    picture = price.picture
    assert predict(found, job, free_messages).picture is None
    assert max(one.end for row in picture.rows for one in row) <= picture.seconds == price.seconds
    for row, one in zip(picture.rows, found, strict=True):
        assert [(x.op, x.micro_batch) for x in row] == [(x.op, x.micro_batch) for x in one.step.row]
        assert all(a.end <= b.start for a, b in itertools.pairwise(row))
        assert {x.end - x.start for x in row} == {2 / chunks, 4 / chunks}
        assert max(x.top for x in row) == 100 + max(one.step.tops)
        assert [x.alive.get("activations", 0) for x in row] == one.step.after
        assert {x.alive["weights"] for x in row} == {100}


def test_a_step_of_one_rank_is_drawn_and_a_very_long_one_is_not(free_messages):
    from mindspeed.planner.time.picture import MOST_ACTIONS

    pictures = []
    for batches in (3, MOST_ACTIONS // 2 + 1):
        job = shape(1, 2, batches)
        (one,) = found = traces(job)
        one.step.row = [recordings.Place(op, 0, n) for n in range(batches) for op in "FB"]
        one.step.after = one.step.tops = [0] * len(one.step.row)
        one.step.kinds_after = lambda row=one.step.row: [Counter()] * len(row)
        pictures.append(predict(found, job, free_messages, drawn=True).picture)
    (row,) = pictures[0].rows
    assert [(one.start, one.end) for one in row] == [
        (0, 2), (2, 6), (6, 8), (8, 12), (12, 14), (14, 18),
    ]  # fmt: skip
    assert pictures[1] is None


@pytest.mark.parametrize("schedule", ["zb-v", "auto"])
def test_time_is_that_of_the_row_that_runs(schedule, free_messages, monkeypatch):
    """The trainer plans a schedule without the seconds of this cluster; so does a prediction."""
    from mindspeed.planner.time import step_plan

    job = shape(4, 8, 16, 2 if schedule == "zb-v" else 1, request=ScheduleRequest(schedule))
    planned = []
    simulate = step_plan.simulate
    monkeypatch.setattr(step_plan, "simulate", lambda *x: planned.append(x[0]) or simulate(*x))
    found = traces(job)
    for one in found:
        one.step.seconds = {
            (op, chunk): seconds
            for op, seconds in {"F": 1.0, "I": 1.3, "W": 0.3}.items()
            for chunk in range(job.chunks)
        }
    predict(found, job, free_messages)
    (plan,) = planned
    assert plan.rows == build_plan(ScheduleRequest(schedule), 4, job.chunks, 16).rows
