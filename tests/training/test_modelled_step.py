"""A modelled step has the bytes of the spec's formulas and of real ranks, layer by layer."""

from __future__ import annotations

import pytest

from mindspeed.instruments.clock import Interval
from mindspeed.instruments.ledger import Communication
from mindspeed.training import modelled_costs
from mindspeed.training.modelled_step import OUTSIDE
from tests.support.lazy import needs
from tests.support.trainer_job import SETUP
from tests.training import modelled_step_job as job

needs("megatron.core")

TE = "--transformer-impl transformer_engine"
TWO = f"{TE} --num-layers 2"
TP = f"{TWO} --tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ZERO_1 = f"{TWO} --use-distributed-optimizer --global-batch-size 4"
OVERLAP = f"{ZERO_1} --overlap-grad-reduce --ddp-bucket-size 20000"
CASES = {
    "tp": (TP, 2),
    "sp": (SP, 2),
    "sp-full": (f"{SP} {FULL}", 2),
    "sp-level-2": (f"{SP} {FULL} --optimize-recomp-communication-level 2", 2),
    "sp-coc": (f"{SP} --coc-parallel-num 2", 2),
    "local": (SP.replace("transformer_engine", "local"), 2),
    "fused": (f"{SP} --use-flash-attn --use-fused-rmsnorm", 2),
    "dp": (ZERO_1, 2),
    "dp-overlap": (OVERLAP, 2),
    "dp-overlap-both": (f"{OVERLAP} --overlap-param-gather", 2),
    "experts": ("--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall", 2),
}
U = 64 * 2 * 64 * 4 // 2
"""Bytes that a rank sends in one all-gather of an activation ``[s, b, h]`` of two ranks, fp32."""


@pytest.fixture(scope="module")
def found(rank_pool):
    cases = list(CASES.values())
    (answers,) = rank_pool.run(1, job.modelled, cases, setup=SETUP, backend=None, timeout=200)
    return dict(zip(CASES, answers, strict=True))


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
    layers = {name: costs for name, costs in found[case]["layers"].items() if name != OUTSIDE}
    assert list(layers) == [f"layer {number}" for number in (1, 2)]
    for phases in layers.values():
        sent = {phase: sum(costs.sent.values()) for phase, costs in phases.items()}
        assert sent == {phase: factor * U for phase, factor in units.items()}
    assert found[case]["alike"] == [OUTSIDE, "layers 1-2"]


def test_features_are_in_force(found):
    plain, coc = (found[name]["layers"]["layer 2"] for name in ("sp", "sp-coc"))
    assert plain["forward"].calls == {"all_gather": 2, "reduce_scatter": 2}
    assert coc["forward"].calls == {"all_gather": 4, "reduce_scatter": 4}
    assert coc["forward"].flops == plain["forward"].flops
    for name, units in {"sp-full": 14, "sp-level-2": 10}.items():
        phases = found[name]["layers"]["layer 1"].values()
        assert sum(sum(costs.sent.values()) for costs in phases) == units * U


def test_flops_of_a_layer_are_those_of_its_products(found):
    tokens, h, heads, kv, ffn = 128, 64, 64, 16, 176
    weights = h * (h + 2 * kv) + h * heads + 3 * h * ffn
    attention = 2 * 2 * 2 * (64 * 65 // 2) * h  # causal scores and sum of values, two samples
    phases = found["dp"]["layers"]["layer 2"]
    assert phases["forward"].flops == 2 * tokens * weights + attention
    assert phases["forward"].computing == pytest.approx(phases["forward"].flops / job.FLOPS)
    assert found["sp-full"]["layers"]["layer 2"]["recompute"].flops == (
        found["sp-full"]["layers"]["layer 2"]["forward"].flops
    )


def test_time_is_computing_and_waiting(found):
    for name in CASES.keys() - {"experts"}:
        costs = found[name]["total"]
        assert found[name]["seconds"] == pytest.approx(costs.computing + costs.exposed)
    forward = found["sp"]["layers"]["layer 2"]["forward"]  # nothing is hidden in this pass
    assert forward.exposed == pytest.approx(4 * (job.LATENCY + U / job.BANDWIDTH))


def test_overlap_of_data_parallelism_lowers_exposed_time_alone(found):
    plain, reduced, both = (found[n]["total"] for n in ("dp", "dp-overlap", "dp-overlap-both"))
    assert reduced.sent == both.sent
    for op, sent in plain.sent.items():  # buckets are padded
        assert sent == pytest.approx(reduced.sent[op], rel=0.01)
    assert plain.flops == reduced.flops == both.flops
    assert 0 < both.exposed < reduced.exposed < plain.exposed
    layers = found["dp-overlap"]["layers"]
    assert layers["layer 2"]["backward"].sent["reduce_scatter"] > 0


@pytest.mark.parametrize("case", ["sp-full", "dp"])
def test_it_communicates_what_real_ranks_do(found, ranks, case):
    flags, size = CASES[case]
    for counted in ranks(size, job.real, flags, size, setup=SETUP, backend=None, timeout=200):
        assert counted == found[case]["counted"]


def test_stages_of_a_pipeline_differ(ranks):
    flags = f"{TE} --pipeline-model-parallel-size 2"
    ((first, last),) = ranks(1, job.staged, flags, 2, (0, 1), setup=SETUP, backend=None)
    assert [name for name in first["layers"] if name != OUTSIDE] == ["layer 1", "layer 2"]
    assert [name for name in last["layers"] if name != OUTSIDE] == ["layer 3", "layer 4"]
    assert first["total"].calls["send"] == last["total"].calls["send"] == 1
    assert last["total"].flops > first["total"].flops


def test_a_rank_of_a_v_shape_has_layers_of_both_ways(ranks):
    flags = (
        f"{TE} --pipeline-model-parallel-size 2 --global-batch-size 8 --schedules-method dualpipev"
    )
    ((first, turn),) = ranks(1, job.staged, flags, 2, (0, 1), setup=SETUP, backend=None)
    assert [name for name in first["layers"] if name != OUTSIDE] == ["layer 1", "layer 4"]
    assert [name for name in turn["layers"] if name != OUTSIDE] == ["layer 2", "layer 3"]
    # Of four micro-batches, down and up; and one byte that opens the connection.
    assert first["total"].calls["send"] == turn["total"].calls["send"] == 2 * 4 + 1


def test_what_depends_on_values_is_refused(found):
    reason = found["experts"]["refused"]
    assert reason.startswith("shapes of routed experts depend on values; mindspeed plan --check")


def _interval(kind, scope, start, end, phase="forward", op=None, **options):
    call = op and Communication(op, "0", "TENSOR_MODEL_PARALLEL_GROUP", (0, 1), phase, 8, 4)
    return Interval(kind, op or "mm", start, end, phase, call, scope=scope, **options)


def test_layers_alike_are_one_row_and_others_are_not():
    intervals = []
    for number in (1, 2, 3, 5):
        intervals.append(_interval("compute", f"layer {number}", 0.0, 1.0, flops=10))
    intervals.append(_interval("wait", "layer 3", 1.0, 1.5, op="all_gather"))
    layers = modelled_costs.by_layer(intervals)
    names = [name for name, _, _ in modelled_costs.alike(layers)]
    assert names == ["layers 1-2, 5", "layer 3"]


def test_a_trace_has_a_lane_for_operators_waits_and_each_group():
    intervals = [
        _interval("compute", "layer 1", 0.0, 1.0, flops=10),
        _interval("communication", "layer 1", 1.0, 3.0, op="all_gather"),
        _interval("wait", "layer 1", 1.0, 3.0, op="all_gather"),
    ]
    events = modelled_costs.chrome_trace(intervals, "title")["traceEvents"]
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    assert list(lanes) == ["operators", "tensor model parallel", "waiting"]
    spans = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("mm", 0, 0.0, 1e6),
        ("all_gather", 1, 1e6, 2e6),
        ("all_gather", 2, 1e6, 2e6),
    ]
