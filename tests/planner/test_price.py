"""Composition of memory and time from pieces whose sums are known in closed form."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.schedules import ScheduleRequest
from mindspeed.planner.cluster import load_cluster
from mindspeed.planner.composed.figures import Figure, Quantity
from tests.support.lazy import Lazy

groups = Lazy("mindspeed.planner.time.step_plan")
layouts = Lazy("mindspeed.planner.layout")
memory = Lazy("mindspeed.planner.time.prediction", "memory")
messages = Lazy("mindspeed.planner.time.prediction", "messages")
figures = Lazy("mindspeed.planner.composed.figures")
pieces = Lazy("mindspeed.planner.composed.pieces")
predict = Lazy("mindspeed.planner.time.prediction", "predict")
reshaped = Lazy("mindspeed.planner.search.evaluator", "reshaped")
Shape = Lazy("mindspeed.planner.shape", "Shape")
step_plan = Lazy("mindspeed.planner.time.step_plan", "step_plan")
whole_only = Lazy("mindspeed.planner.shape", "whole_only")
spliced_only = Lazy("mindspeed.planner.shape", "spliced_only")
Signature = Lazy("mindspeed.planner.composed.signature", "Signature")

KEPT, STATIC, FORWARD, BACKWARD = 100.0, 1000.0, 40.0, 70.0


def key(quantity: str, op: str = "", name: str = "", size: int = 0, collective: str = "") -> Any:
    """The key of a figure."""
    return Figure(Quantity(quantity), op, name, size, collective)


def need(role: str, kind: str, previous: str, op: str) -> Any:
    """The key of an action in a rank with one chunk."""
    return pieces.Need(pieces.Context(role), kind, pieces.Previous(previous), op)


KEEPS, FREED, TAIL, WEIGHTS = key("kept"), key("freed"), key("tail"), key("static", name="weights")
STATES, HOST = key("static", name="optimizer"), key("host")
F, B, INPUT, WEIGHT = (key("seconds", op) for op in "FBIW")
GATHER = key("dense_bytes", collective="all_gather")
REDUCE = key("dense_bytes", collective="reduce_scatter")
LAYER = {WEIGHTS: STATIC, STATES: 800.0, KEEPS: KEPT, key("stash"): 0.0}
LAYER |= {TAIL: 0.0, key("flops"): 6.0, F: 1.0, B: 2.0, key("seconds", "end"): 0.0}
NOTHING = dict.fromkeys(LAYER, 0.0)
FIRST = NOTHING | {WEIGHTS: 300.0}
LAST = NOTHING | {WEIGHTS: 500.0, F: 0.5, B: 1.0}


def signature(**roles: dict[Any, float]) -> Any:
    """Dense layers; the first and the last stage have something more."""
    needs = {
        need(role, "dense", before, op): {"F": FORWARD, "B": BACKWARD}[op]
        for role in ("first", "middle", "last", "only")
        for before in ("", "F", "B")
        for op in "FB"
    }
    known = {"first": FIRST, "middle": NOTHING, "last": LAST, "only": NOTHING} | roles
    return Signature({"dense": LAYER}, known, needs, {}, {}, {"dense": {STATES: 1.0}}, 2, 0.0)


def required(one: Any, role: str, kinds: tuple[str, ...], previous: str, op: str) -> float:
    """Composed bytes of an action in a rank with one chunk."""
    return one.need(pieces.Context(role), kinds, pieces.Previous(previous), op)


def shape(ranks: int, layers: int, batches: int, chunks: int = 1, **changes: object) -> Any:
    """Layers spread evenly, one device a rank."""
    stages = ranks * chunks
    kind = "interleaved" if chunks > 1 else "1f1b"
    found = Shape(
        request=ScheduleRequest(kind),
        ranks=ranks,
        chunks=chunks,
        stages=(("dense",) * (layers // stages),) * stages,
        micro_batch=1,
        micro_batches=batches,
        data_parallel=2,
        devices=2 * ranks,
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


def test_1f1b_keeps_as_many_micro_batches_as_there_are_stages_behind():
    ranks = list(memory(signature(), shape(4, 8, 12)))
    for index, rank in enumerate(ranks):
        in_flight, layers = 4 - index, 2
        # Backward begins with all of them; forward of the last has kept one layer of its own.
        expected = max(
            in_flight * layers * KEPT + BACKWARD,
            (in_flight - 1) * layers * KEPT + KEPT + FORWARD,
        )
        assert rank.activations == expected
    assert ranks[0].static["weights"] == 2 * STATIC + 300.0
    assert ranks[1].static["weights"] == 2 * STATIC
    assert ranks[3].static["weights"] == 2 * STATIC + 500.0


def test_what_the_first_action_finds_released_is_not_alive_at_the_peak():
    one = signature()
    freed = replace(one, layers={"dense": LAYER | {FREED: 30.0}}, shared={"dense": {FREED: 1.0}})
    for ranks, share in ((2, 1.0), (8, 0.25)):  # measured with two data-parallel ranks
        wide = shape(4, 8, 12, data_parallel=ranks)
        with_it, without = next(memory(freed, wide)), next(memory(one, wide))
        assert with_it.activations == without.activations - 2 * 30.0 * share


def test_interleaved_keeps_p_plus_p_minus_1_over_v():
    ranks, chunks = 4, 2
    found = next(memory(signature(), shape(ranks, 16, 16, chunks)))
    kept = (ranks + (ranks - 1) / chunks) * 4 * KEPT  # four layers on a rank
    assert found.activations == kept + BACKWARD


def test_data_parallel_ranks_share_the_optimizer():
    two = next(memory(signature(), shape(2, 4, 4)))
    eight = next(memory(signature(), shape(2, 4, 4, data_parallel=8)))
    assert eight.static["optimizer"] == two.static["optimizer"] / 4
    assert eight.static["weights"] == two.static["weights"]


def test_uneven_layers_and_no_op_layers():
    stages = (("dense",), ("dense",) * 3, ("dense", "noop"))
    ranks = list(memory(signature(), shape(3, 6, 6, stages=stages)))
    assert [rank.static["weights"] for rank in ranks] == [1300.0, 3000.0, 1500.0]
    assert ranks[1].activations == 2 * 3 * KEPT + BACKWARD


def test_recomputed_layers_come_first_and_keep_their_input():
    light = LAYER | {KEEPS: 10.0}
    one = replace(
        signature(),
        layers={"dense+recomputed": light, "dense": LAYER},
        needs={
            **signature().needs,
            need("middle", "dense+recomputed", "F", "B"): 200.0,
            need("middle", "dense+recomputed", "B", "B"): 200.0,
        },
    )
    kinds = ("dense+recomputed", "dense+recomputed", "dense")
    # The recomputed layer that runs first in backward: the stored one after it is released.
    assert required(one, "middle", kinds, "F", "B") == max(BACKWARD, 200.0 - KEPT)


def test_backward_of_a_layer_finds_what_the_head_kept_released():
    head = 350.0
    one = signature(last=LAST | {KEEPS: head})
    needs = {
        **one.needs,
        need("last", "dense", "F", "B"): 20.0,
        need("middle", "dense", "F", "B"): 90.0,
    }
    one = replace(one, needs=needs, inner={("dense", "B"): 15.0})
    kinds = ("dense", "dense")
    # The layer that runs first needs 90 beyond what layers keep; the head's 350 are gone by then.
    assert required(one, "last", kinds, "F", "B") == 20.0
    # Its own run has a layer, which needs 20 at most, and 15 more with another before it.
    small = replace(one, roles={**one.roles, "last": LAST | {KEEPS: 30.0}})
    assert required(small, "last", kinds, "F", "B") == 20.0 + 15.0
    # Forward of the layers comes before the head has kept anything.
    needs[need("middle", "dense", "F", "F")] = 90.0
    forward = replace(one, needs=needs, inner={("dense", "F"): 15.0})
    assert required(forward, "last", kinds, "F", "F") == FORWARD + 15.0 + KEPT


@pytest.mark.parametrize("batches", [4, 12, 4001])
def test_seconds_of_1f1b_are_those_of_the_formula(batches, free_messages):
    """(m + p - 1) (tF + tB), with equal stages; long steps are continued from short ones."""
    one = signature(first=NOTHING, last=NOTHING)
    found = predict(one, shape(4, 8, batches), free_messages)
    assert found.seconds == pytest.approx((batches + 3) * 2 * (1.0 + 2.0))
    assert found.bubble == pytest.approx(3 / (batches + 3))


@pytest.mark.parametrize(("ranks", "batches"), [(3, 1001), (4, 803), (6, 502)])
def test_long_steps_with_latency_are_those_of_the_whole_schedule(ranks, batches, monkeypatch):
    """1F1B with messages that take time repeats every p micro-batches, not every one."""
    from mindspeed.planner.composed import step_plan

    cluster = load_cluster("h100")
    job = shape(ranks, ranks, batches, message=1 << 30, overlap_messages=True)
    one = signature(first=NOTHING, last=NOTHING)
    short = predict(one, job, cluster)
    monkeypatch.setattr(step_plan, "MOST_ACTIONS", 1 << 60)
    whole = predict(one, job, cluster)
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-12)
    assert short.bubble == pytest.approx(whole.bubble, rel=1e-9)


def test_seconds_of_the_interleaved_schedule(free_messages):
    one = signature(first=NOTHING, last=NOTHING)
    found = predict(one, shape(4, 16, 16, 2), free_messages)
    assert found.seconds == pytest.approx((16 + 3 / 2) * 4 * 3.0)


def test_a_heavy_head_slows_every_micro_batch(free_messages):
    found = predict(signature(), shape(4, 8, 100), free_messages)
    light = predict(signature(last=NOTHING), shape(4, 8, 100), free_messages)
    # The last stage takes 7.5 instead of 6 seconds; the others wait for it.
    assert found.seconds - light.seconds == pytest.approx(100 * 1.5)
    assert found.limit == "compute"


def test_messages_that_block_lengthen_the_stages_between(free_messages):
    slow = load_cluster("h100")
    message = slow.collective_seconds("send", 1 << 30, (0, 2))
    found = predict(signature(first=NOTHING, last=NOTHING), shape(4, 8, 64, message=1 << 30), slow)
    assert found.seconds == pytest.approx((64 + 3) * 6 + 2 * message * (64 + 2), rel=0.01)
    assert found.exposed["messages"] == pytest.approx(2 * 64 * message)


def test_data_parallel_reduction_hides_behind_the_last_backward():
    cluster = load_cluster("h100")
    heavy = {"dense": LAYER | {REDUCE: 400e9, GATHER: 200e9}}
    one = replace(signature(first=NOTHING, last=NOTHING), layers=heavy)
    shown = predict(one, shape(2, 4, 4), cluster).exposed["data parallel"]
    hidden = predict(one, shape(2, 4, 4, overlap_gradients=True), cluster)
    expected = cluster.collective_seconds("reduce_scatter", 800e9, (0, 1))
    expected += cluster.collective_seconds("all_gather", 200e9, (0, 1))
    assert shown == pytest.approx(expected)
    gather = cluster.collective_seconds("all_gather", 200e9, (0, 1))
    backward = 2 * 2.0
    left = max(0.0, expected - gather - backward) + gather
    assert hidden.exposed["data parallel"] == pytest.approx(left)


def test_a_gather_hides_behind_the_next_forward():
    cluster = load_cluster("h100")
    heavy = {"dense": LAYER | {GATHER: 800e9}}
    one = replace(signature(first=NOTHING, last=NOTHING), layers=heavy)
    seconds = cluster.collective_seconds("all_gather", 800e9, (0, 1))
    hidden = predict(one, shape(2, 4, 4, overlap_parameters=True), cluster)
    forward = 2 * 1.0
    assert seconds > forward
    assert hidden.exposed["data parallel"] == pytest.approx(seconds - forward)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_mfu_is_a_part_of_the_peak_of_the_dtype(dtype):
    cluster = load_cluster("a100")
    found = predict(signature(), shape(2, 4, 4, dtype=dtype, model_flops=1e15), cluster)
    peak = 1e12 * cluster.device.peak_tflops[dtype]
    assert found.mfu == pytest.approx(1e15 / (found.seconds * 4 * peak))  # on four devices


def test_what_fits():
    cluster = load_cluster("h100")
    big = replace(signature(), layers={"dense": LAYER | {WEIGHTS: 60e9}})
    found = predict(big, shape(2, 4, 4), cluster)
    assert not found.fits and not found.ranks[0].fits
    assert found.peak_bytes == max(rank.peak for rank in found.ranks)
    assert predict(signature(), shape(2, 4, 4), cluster).fits


def test_groups_of_ranks():
    wide = shape(2, 4, 4, data_parallel=4, tensor=2, expert=4, context=1, devices=16)
    assert groups.dense_ranks(wide) == (0, 2, 4, 6)
    assert groups.expert_ranks(wide) == (0, 4)


def test_what_a_rank_has_once_is_counted_once_for_its_chunks():
    once = {frozenset({"first", "middle"}): {WEIGHTS: 30.0, TAIL: 5.0}}
    one = replace(signature(), once=once)
    chunks = [("first", ("dense",)), ("middle", ("dense",)), ("middle", ("dense", "noop"))]
    assert one.rank(chunks)[WEIGHTS] == 3 * STATIC + 300.0 - 2 * 30.0
    assert one.rank(chunks[:1])[WEIGHTS] == STATIC + 300.0
    # A rank whose chunks have other roles has the same once.
    assert one.rank([("middle", ("dense",))] * 2)[TAIL] == -5.0


def test_dense_parameters_beside_experts_are_gathered_as_often_as_theirs():
    dense = LAYER | {REDUCE: 40.0, GATHER: 20.0}
    expert = LAYER | {REDUCE: 8.0, GATHER: 8.0}
    one = replace(signature(), layers={"dense": dense, "expert": expert})
    assert one.chunk("middle", ("dense", "expert"))[GATHER] == 48.0
    assert one.chunk("middle", ("dense",))[GATHER] == 20.0


def test_messages_around_an_action_depend_on_the_rank_and_on_the_action_before():
    def at(role: str, roles: list[str], rank: int, previous: Any) -> Any:
        return pieces.Need(pieces.Context.of(role, roles, rank), "dense", previous, "B")

    same, another = pieces.Previous("F"), pieces.Previous("F", other_chunk=True)
    roles = ["middle", "middle"]
    needs = {
        at("middle", roles, 0, same): 10.0,
        at("middle", roles, 0, another): 12.0,
        at("middle", roles, 1, same): 14.0,
        at("first", ["first", "middle"], 0, same): 16.0,
    }
    one = replace(signature(), needs=needs)

    def found(one: Any, role: str, roles: list[str], rank: int, previous: Any) -> float:
        return one.need(pieces.Context.of(role, roles, rank), ("dense",), previous, "B")

    assert found(one, "middle", roles, 2, same) == 10.0
    assert found(one, "middle", roles, 2, another) == 12.0
    assert found(one, "middle", roles, 1, another) == 14.0
    # What was not seen is the most of what is nearest to it: first after the same action of
    # another chunk, not after another action.
    seen = {key: value for key, value in needs.items() if key.previous != same}
    seen |= {at("middle", roles, 0, pieces.Previous("B")): 30.0}
    assert found(replace(signature(), needs=seen), "middle", roles, 2, same) == 12.0
    assert found(one, "middle", ["middle", "last"], 3, same) == 14.0
    assert found(one, "last", ["middle", "last"], 3, same) == 14.0


def test_messages_at_the_end_of_a_step_are_over_the_groups_of_the_job():
    wide = shape(4, 8, 4, data_parallel=4, tensor=2, devices=32)
    assert groups.group_ranks("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", 4, wide) == tuple(
        range(32)
    )
    assert groups.group_ranks("EMBEDDING_GROUP", 2, wide) == (0, 24)
    assert groups.group_ranks("MODEL_PARALLEL_GROUP", 0, wide) == (0, 1, 8, 9, 16, 17, 24, 25)
    assert groups.group_ranks("TENSOR_MODEL_PARALLEL_GROUP", 2, wide) == (0, 1)
    cluster = load_cluster("h100")
    embedding = ("end", "EMBEDDING_GROUP", 2, "all_reduce")
    sent = {key("payload", *embedding): 4e6, key("calls", *embedding): 2.0}
    expected = 2 * cluster.collective_seconds("all_reduce", 2e6, (0, 24))
    assert groups.closing_seconds(sent, wide, cluster) == pytest.approx(expected)


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
    assert what in one.uncomposable and bool(what) == bool(one.uncomposable)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"recompute_num_layers": 2}, "groups of 2"),
        ({"recompute_method": "block", "recompute_num_layers": 2}, ""),
        ({"recompute_norm_num_layers": 2}, "--recompute-norm-num-layers"),
        ({"recompute_norm_num_layers": 8}, ""),
        ({"window_attn_skip_freq": [1, 0]}, "--window-attn-skip-freq"),
        ({"adaptive_recompute_device_size": -1}, ""),
        ({"adaptive_recompute_device_size": 1000}, "--adaptive-recompute-device-size"),
        ({"zero_stage": 1}, ""),
        ({"zero_stage": 2}, "--zero-stage 2"),
        ({"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances"),
        ({"virtual_optimizer": ("all",)}, ""),
        ({"virtual_optimizer": ("1.5",)}, "--virtual-optimizer SIZE"),
        ({"activation_plan": "{all: {input_layernorm: recompute_output}}"}, ""),
        ({"activation_plan": "{2: {input_layernorm: recompute_output}}"}, "--activation-plan"),
    ],
)
def test_flags_by_which_layers_differ_are_not_estimated(changes, what, tmp_path):
    (tmp_path / "plan.yaml").write_text(str(changes.get("activation_plan")))
    if "activation_plan" in changes:
        changes = {"activation_plan": str(tmp_path / "plan.yaml")}
    values = {"recompute_granularity": "full", "recompute_method": "uniform", "num_layers": 8}
    args = SimpleNamespace(**values | {"recompute_num_layers": 1} | changes)
    found = whole_only(args) or spliced_only(args)
    assert what in found and bool(what) == bool(found)


def test_messages_are_those_of_the_actions_of_the_schedule():
    sent = {"F": 2.0, "B": 5.0, "I": 4.0, "W": 3.0}
    name = key("calls", "", "TENSOR_MODEL_PARALLEL_GROUP", 2, "all_gather")
    layer = LAYER | {name._replace(op=op): count for op, count in sent.items()}
    one = replace(signature(), layers={"dense": layer})
    divided = shape(4, 8, 6, request=ScheduleRequest("zb-h1"))
    plans = step_plan(divided, Costs())
    for rank, row in enumerate(plans.short.rows):
        expected = 2 * sum(sent.get(action.op, 0.0) for action in row)
        assert messages(one, divided, rank, plans.actions[rank])[name] == expected
    whole = shape(4, 8, 3000, request=ScheduleRequest("1f1b"))
    actions = step_plan(whole, Costs()).actions
    assert messages(one, whole, 1, actions[1])[name] == 2 * 3000 * (2.0 + 5.0)


def test_what_runs_had_only_whole_or_only_divided():
    sent = {op: key("calls", op, "G", 2, "send") for op in "BI"}
    whole = figures.with_split_backward({F: 1.0, B: 3.0, sent["B"]: 2.0})
    assert whole[INPUT] == 3.0 and whole[WEIGHT] == 0.0
    assert whole[sent["I"]] == 2.0
    waits = {op: key("wait", op, "G") for op in "BIW"}
    parts = figures.with_split_backward({INPUT: 1.0, WEIGHT: 2.0, waits["I"]: 4.0, waits["W"]: 1.0})
    assert parts[B] == 3.0 and parts[waits["B"]] == 5.0
    difference = figures.difference({F: 3.0, B: 4.0, KEEPS: 2.0}, {F: 1.0})
    assert difference == {F: 2.0, KEEPS: 2.0}


def test_states_in_host_memory_are_shared_as_those_of_the_device():
    one = {STATES: 8.0, HOST: 8.0, KEEPS: 8.0}
    two = {STATES: 4.0, HOST: 4.0, KEEPS: 8.0}
    assert figures.data_parallel_shared_fraction(one, two) == {STATES: 1.0, HOST: 1.0}
    assert figures.of_steps(one) == {STATES: 8.0, HOST: 8.0}


def test_a_shape_for_another_pipeline():
    request = ScheduleRequest("interleaved", group_size=4)
    base = replace(shape(4, 16, 8, 2), request=request)
    found = reshaped(base, layouts.Layout(16, 16, pp=8, vpp=2))
    assert (found.ranks, found.chunks, found.request.group_size) == (8, 2, 8)
    vee = replace(shape(4, 16, 8, 2), request=ScheduleRequest("zb-v"))
    found = reshaped(vee, layouts.Layout(16, 16, pp=2, schedule="zb-v"))
    assert (found.chunks, found.stages) == (2, (("dense",) * 4,) * 4)


@pytest.mark.parametrize(("error", "counts"), [(0.0, 1), (0.02, 3)])
def test_candidates_whose_bytes_do_not_compose_are_counted(monkeypatch, error, counts):
    module = importlib.import_module("mindspeed.planner.search.plan")
    asked = []
    monkeypatch.setattr(module, "counted_peak", lambda *given: asked.append(given[1]) or 7)
    rank = SimpleNamespace(rank=0, peak=5.0)
    prediction = SimpleNamespace(peak_bytes=5, seconds=1.0, ranks=(rank,), exposed={})
    best = [(layouts.Layout(n, n), prediction) for n in (1, 2, 4)]
    outcome = SimpleNamespace(best=best, interrupted=False)
    job = SimpleNamespace(flags=lambda overrides: [])
    evaluator = SimpleNamespace(error=lambda layout, peak: error * peak / 5.0)
    found = list(module._proven(job, evaluator, outcome, 10.0, 1))
    assert asked == [layout for layout, _ in best[:counts]]
    assert [one.counted for one in found] == [7] * counts + [None] * (3 - counts)
