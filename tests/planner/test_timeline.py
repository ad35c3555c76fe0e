"""A timed step has the bytes of the spec's formulas, layer by layer; and how it is shown."""

from __future__ import annotations

import json

import pytest

from mindspeed.instruments.clock import TimedCall
from mindspeed.instruments.ledger import Communication
from mindspeed.instruments.timeline import write_trace
from mindspeed.planner.count import layer_costs
from mindspeed.planner.count.layer_costs import Scope
from tests.planner import timed_jobs
from tests.support.lazy import needs

needs("megatron.core")

SETUP = "tests.support.warm"
TE = "--transformer-impl transformer_engine"
TWO = f"{TE} --num-layers 2 --seq-length 64"
TP = f"{TWO} --tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ZERO_1 = f"{TWO} --use-distributed-optimizer --global-batch-size 4"
OVERLAP = f"{ZERO_1} --overlap-grad-reduce --ddp-bucket-size 20000"
PIPELINE = f"{TE} --num-layers 4 --pipeline-model-parallel-size 2"
V_SHAPE = f"{PIPELINE} --global-batch-size 8 --schedules-method dualpipev"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
# Flags, ranks, stage.
CASES = {
    "tp": (TP, 2, 0),
    "sp": (SP, 2, 0),
    "sp-full": (f"{SP} {FULL}", 2, 0),
    "sp-level-2": (f"{SP} {FULL} --optimize-recomp-communication-level 2", 2, 0),
    "sp-coc": (f"{SP} --coc-parallel-num 2", 2, 0),
    "local": (SP.replace("transformer_engine", "local"), 2, 0),
    "fused": (f"{SP} --use-flash-attn --use-fused-rmsnorm", 2, 0),
    "dp": (ZERO_1, 2, 0),
    "dp-overlap": (OVERLAP, 2, 0),
    "dp-overlap-both": (f"{OVERLAP} --overlap-param-gather", 2, 0),
    "experts": (f"{TWO} {EXPERTS} --expert-model-parallel-size 2", 2, 0),
    "first": (PIPELINE, 2, 0),
    "last": (PIPELINE, 2, 1),
    "down and up": (V_SHAPE, 2, 0),
    "turn": (V_SHAPE, 2, 1),
}
U = 64 * 2 * 64 * 4 // 2
"""Bytes that a rank sends in one all-gather of an activation ``[s, b, h]`` of two ranks, fp32."""


@pytest.fixture(scope="module")
def found(rank_pool):
    answers = {}
    for name, case in CASES.items():  # features change between jobs
        (answers[name],) = rank_pool.run(
            1, timed_jobs.costs_of_layers, *case, setup=SETUP, backend=None, timeout=200
        )
    return answers


def _layers(found, case):
    return {name: costs for name, costs in found[case]["layers"].items() if ", " in name}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "units"),
    [
        ("tp", {"forward": 4, "backward": 4}),
        ("sp", {"forward": 4, "backward": 6}),
        ("local", {"forward": 4, "backward": 6}),
        ("fused", {"forward": 4, "backward": 6}),
        ("sp-full", {"forward": 4, "recompute": 4, "backward": 6}),
        ("sp-coc", {"forward": 4, "backward": 6}),
        ("dp", {"forward": 0, "backward": 0}),
    ],
)
def test_bytes_of_every_layer_are_those_of_the_formula(found, case, units):
    layers = _layers(found, case)
    assert list(layers) == [f"chunk 0, layer {number}" for number in (1, 2)]
    for phases in layers.values():
        sent = {phase: sum(costs.sent.values()) for phase, costs in phases.items()}
        assert sent == {phase: factor * U for phase, factor in units.items()}


def test_features_are_in_force(found):
    plain, coc = (_layers(found, name)["chunk 0, layer 2"] for name in ("sp", "sp-coc"))
    assert plain["forward"].calls == {"all_gather": 2, "reduce_scatter": 2}
    assert coc["forward"].calls == {"all_gather": 4, "reduce_scatter": 4}
    assert coc["forward"].flops == plain["forward"].flops
    for name, units in {"sp-full": 14, "sp-level-2": 10}.items():
        phases = _layers(found, name)["chunk 0, layer 1"].values()
        assert sum(sum(costs.sent.values()) for costs in phases) == units * U


def test_flops_of_a_layer_are_those_of_its_products(found):
    tokens, h, heads, kv, ffn = 128, 64, 64, 16, 176
    weights = h * (h + 2 * kv) + h * heads + 3 * h * ffn
    attention = 2 * 2 * 2 * (64 * 65 // 2) * h  # causal scores and sum of values, two samples
    phases = _layers(found, "dp")["chunk 0, layer 2"]
    assert phases["forward"].flops == 2 * tokens * weights + attention
    again = _layers(found, "sp-full")["chunk 0, layer 2"]
    assert again["recompute"].flops == again["forward"].flops


@pytest.mark.parametrize("case", CASES)
def test_time_is_computing_and_waiting(found, case):
    costs = found[case]["total"]
    assert found[case]["seconds"] == pytest.approx(costs.computing + costs.exposed)


def test_overlap_of_data_parallelism_lowers_exposed_time_alone(found):
    plain, reduced, both = (found[n]["total"] for n in ("dp", "dp-overlap", "dp-overlap-both"))
    assert reduced.sent == both.sent
    for op, sent in plain.sent.items():  # buckets are padded
        assert sent == pytest.approx(reduced.sent[op], rel=0.01)
    assert plain.flops == reduced.flops == both.flops
    assert 0 < both.exposed < reduced.exposed < plain.exposed
    assert _layers(found, "dp-overlap")["chunk 0, layer 2"]["backward"].sent["reduce_scatter"] > 0


def test_stages_of_a_pipeline_differ(found):
    assert list(_layers(found, "first")) == ["chunk 0, layer 1", "chunk 0, layer 2"]
    assert list(_layers(found, "last")) == ["chunk 0, layer 3", "chunk 0, layer 4"]
    first, last = found["first"]["total"], found["last"]["total"]
    assert first.calls["send"] == last.calls["send"] == 1
    assert last.flops > first.flops


def test_a_rank_of_a_v_shape_has_layers_of_both_ways(found):
    assert set(_layers(found, "down and up")) == {"chunk 0, layer 1", "chunk 1, layer 4"}
    assert set(_layers(found, "turn")) == {"chunk 0, layer 2", "chunk 1, layer 3"}
    # Of four micro-batches, down and up.
    sends = [found[name]["total"].calls["send"] for name in ("down and up", "turn")]
    assert sends == [2 * 4] * 2


def test_experts_exchange_their_tokens(found):
    phases = _layers(found, "experts")["chunk 0, layer 1"]
    for phase in ("forward", "backward"):
        assert phases[phase].calls["all_to_all"] >= 2 and phases[phase].sent["all_to_all"] > 0


def _interval(kind, scope, start, end, phase="forward", op=None, **options):
    call = op and Communication(op, "0", "TENSOR_MODEL_PARALLEL_GROUP", (0, 1), phase, 8, 4)
    lane = {"wait": "waiting", "compute": "operators"}.get(kind, "tensor model parallel")
    return TimedCall(
        lane, kind, op or "mm", start, end, phase, communication=call, scope=scope, **options
    )


def test_layers_alike_are_one_row_and_others_are_not():
    intervals = []
    for number in (1, 2, 3, 5):
        intervals.append(_interval("compute", Scope("layer", 0, number), 0.0, 1.0, flops=10))
    intervals.append(_interval("wait", Scope("layer", 0, 3), 1.0, 1.5, op="all_gather"))
    scopes = layer_costs.by_scope(intervals)
    names = [name for name, _ in layer_costs.group_equal_layers(scopes)]
    assert names == ["chunk 0, layers 1-2, 5", "chunk 0, layer 3"]


def test_a_trace_has_a_lane_for_operators_waits_and_each_group(tmp_path):
    intervals = [
        _interval("compute", "layer 1", 0.0, 1.0, flops=10),
        _interval("communication", "layer 1", 1.0, 3.0, op="all_gather"),
        _interval("wait", "layer 1", 1.0, 3.0, op="all_gather"),
    ]
    write_trace({"step": layer_costs.lanes(intervals)}, tmp_path / "trace.json", "title")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert list(lanes) == ["operators", "waiting", "tensor model parallel"]
    spans = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("mm", 0, 0.0, 1e6),
        ("all_gather", 1, 1e6, 2e6),
        ("all_gather", 2, 1e6, 2e6),
    ]
    details = [e["args"] for e in events if e["ph"] == "X"]
    assert details[0] == {"phase": "forward", "layer": "layer 1", "flops": 10}
    assert details[2] == {"phase": "forward", "layer": "layer 1", "bytes sent": 4}
