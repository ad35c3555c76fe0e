"""Overlapped products: results equal to the bit, the same bytes, the calls multiplied."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from mindspeed.testing import RankError
from tests.support import gpt_ranks
from tests.support.lazy import needs
from tests.te import linear_ranks
from tests.te.linear_ranks import Case
from tests.tensor_parallel import coc_ranks

needs("megatron.core")

SETUP = "tests.support.warm"
PARTS = (2, 4, 8)
OVERLAPPED = {
    # Parallel mode, sequence parallelism: collective of the forward and of the backward pass
    # that are divided.
    ("column", True): {("forward", "all_gather")},
    ("column", False): set(),
    ("row", True): {("forward", "reduce_scatter"), ("backward", "all_gather")},
    ("row", False): {("forward", "all_reduce")},
}
DGRAD = {True: ("backward", "reduce_scatter"), False: ("backward", "all_reduce")}
"""Collective of the input gradient of a column layer: hidden by the weight gradient."""


def sums(events):
    """Calls and bytes of each phase and operation."""
    calls, payload = Counter(), Counter()
    for phase, op, size in events:
        calls[phase, op] += 1
        payload[phase, op] += size
    return calls, payload


def assert_divided(case: Case, events, plain_events, parts: int, column_backward: bool) -> None:
    calls, payload = sums(events)
    plain_calls, plain_payload = sums(plain_events)
    assert payload == plain_payload, case
    divided = set(OVERLAPPED[case.mode, case.sp])
    if case.mode == "column" and (case.frozen or column_backward):
        divided.add(DGRAD[case.sp])
    if case.kind == "ops" and case.mode == "row" and not case.sp:
        divided.discard(("backward", "all_gather"))
    expected = {key: count * (parts if key in divided else 1) for key, count in plain_calls.items()}
    assert calls == expected, case


@pytest.mark.weekly_cases("4")
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_layers_equal_to_the_bit_with_the_same_bytes(ranks, size):
    """Transformer Engine's, a sequence of its operations, the local spec's; frozen, with LoRA."""
    flags = [{}, *({"coc_parallel_num": parts} for parts in PARTS)]
    found = ranks(size, coc_ranks.layers, flags, torch.float32, setup=SETUP, timeout=200)
    for plain, *divided in found:
        for parts, results in zip(PARTS, divided, strict=True):
            for case, (tensors, events) in results.items():
                expected, plain_events = plain[case]
                assert_equal(tensors, expected, case)
                assert_divided(case, events, plain_events, parts, column_backward=False)


def assert_equal(actual, expected, case) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), (case, name)


@pytest.mark.slow
def test_settings_reach_the_layers(ranks, tmp_path):
    """The column layer's input gradient, too; row layers of this shape in 8 parts, of that in 1."""
    rows = coc_ranks.ROWS * coc_ranks.BATCH
    wide = f"[{rows}, {linear_ranks.IN // 2}, {linear_ranks.OUT}]"  # forward of a row layer
    settings = {"enable_coc_in_column_backward": True, "customized_coc": {wide: 8}}
    flags = [{}, {"coc_parallel_num": 2, "coc_cfgs": _file(tmp_path, settings)}]
    settings = {"customized_coc": {wide: 1}}
    flags.append({"coc_parallel_num": 2, "coc_cfgs": _file(tmp_path, settings)})
    plain, ours, whole = ranks(2, coc_ranks.layers, flags, torch.float32, setup=SETUP)[0]
    for case, (tensors, events) in ours.items():
        assert_equal(tensors, plain[case][0], case)
        calls, before = sums(events)[0], sums(plain[case][1])[0]
        if case.mode == "column":
            assert_divided(case, events, plain[case][1], 2, column_backward=True)
        else:
            key = ("forward", "reduce_scatter" if case.sp else "all_reduce")
            assert calls[key] == 8 * before[key], case
            assert sums(whole[case][1])[0][key] == before[key], case


def _file(folder, settings) -> str:
    file = folder / f"{len(list(folder.iterdir()))}.json"
    file.write_text(json.dumps(settings))
    return str(file)


MODELS = [
    ("rmsnorm-swiglu-gqa", "te"),
    ("rmsnorm-swiglu-gqa", "local"),
    ("layernorm-gelu-bias", "local"),
    ("mla", "te"),
    ("moe-sequential", "te"),
]


@pytest.mark.slow
def test_models_compute_and_send_the_same(ranks):
    given = [(*m, flags, {}) for m in MODELS for flags in ({}, {"coc_parallel_num": 4})]
    found = ranks(2, coc_ranks.models, given, setup=SETUP, timeout=120)
    for results in found:
        for model, plain, ours in zip(MODELS, results[::2], results[1::2], strict=True):
            assert_near(ours.tensors, plain.tensors, model)
            assert ours.sent == plain.sent
            assert ours.calls.total() > 1.5 * plain.calls.total()
            assert ours.log == []


def assert_near(actual, expected, what) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        tolerance = 2e-6 * max(value.abs().max().item(), 1.0)
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=tolerance, msg=f"{what}: {name}"
        )


@pytest.mark.slow
def test_kept_gathers_send_8u_and_hold_the_gathered_inputs(ranks, tmp_path):
    kept = {"coc_parallel_num": 2, "coc_cfgs": _file(tmp_path, {"recompute_all_gather": False})}
    for spec in ("te", "local"):
        given = [
            ("rmsnorm-swiglu-gqa", spec, flags, {"num_layers": layers})
            for flags in ({}, kept)
            for layers in (1, 2)
        ]
        results = ranks(2, coc_ranks.models, given, setup=SETUP)[0]
        one, two, kept_one, kept_two = results
        activation = gpt_ranks.SEQUENCE * gpt_ranks.BATCH * 32 * 4  # A: s b h in fp32
        u = activation // 2
        assert two.sent - one.sent == 10 * u
        assert kept_two.sent - kept_one.sent == 8 * u
        more = (kept_two.saved - kept_one.saved) - (two.saved - one.saved)
        # The input of a column layer is a tensor of its own; the gathered one takes its place.
        assert more == 2 * (activation - u)
        assert_near(kept_two.tensors, two.tensors, spec)


def test_fused_kernels_that_cannot_run_say_why_once(ranks):
    fused = ("rmsnorm-swiglu-gqa", "te", {"coc_fused_kernel": True}, {})
    first, second = ranks(2, coc_ranks.models, [fused], setup=SETUP)
    messages = first[0].log
    assert len(messages) == 2 and second[0].log == []
    for operation, message in zip(("gather_matmul", "matmul_scatter"), messages, strict=True):
        reason = "does not run in one fused kernel: there are no fused kernels for tensors on cpu"
        assert message.startswith(f"{operation} [") and reason in message
        assert message.endswith("it runs in 4 parts (said once)")
    with pytest.raises(RankError, match="MINDSPEED_STRICT_FUSION=1 makes this an error"):
        ranks(2, coc_ranks.models, [fused], setup=SETUP, env={"MINDSPEED_STRICT_FUSION": "1"})


def test_rows_that_cannot_be_divided_take_the_next_number(ranks):
    """32 rows of 2 ranks: 16 a rank in 8 parts; the kernels get 12."""
    (messages, parts), _ = ranks(2, coc_ranks.odd_rows, setup=SETUP)
    assert parts == [6, 6, 6]
    assert len(messages) == 3
    for message in messages:
        assert "12 rows cannot be divided into 8 parts; it runs in 6 parts (said once)" in message


# Values of Megatron's config; products in parts: phase and collective.
GATHERS = {("forward", "all_gather"), ("backward", "all_gather")}
OVERLAP = {
    "all": ({}, GATHERS | {("forward", "reduce_scatter")}),
    "no gathers": ({"tp_comm_overlap_ag": False}, {("forward", "reduce_scatter")}),
    "no scatters": ({"tp_comm_overlap_rs": False}, GATHERS),
    "dgrad": (
        {"tp_comm_overlap_rs_dgrad": True, "tp_comm_overlap_rs": False},
        GATHERS | {("backward", "reduce_scatter")},
    ),
}


@pytest.mark.weekly_cases("local")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["te", "local"])
def test_megatrons_vocabulary(ranks, spec):
    name, on = "rmsnorm-swiglu-gqa", {"tp_comm_overlap": True}
    layers = {f"tp_comm_overlap_disable_{layer}": True for layer in ("qkv", "fc1")}
    given = [(name, spec, {}, {})]
    given += [(name, spec, on, on | values) for values, _ in OVERLAP.values()]
    given.append((name, spec, on, on | layers))
    plain, *ours, few = ranks(2, coc_ranks.models, given, setup=SETUP, timeout=120)[0]
    for (_, divided), result in zip(OVERLAP.values(), ours, strict=True):
        more = {key for key, count in result.calls.items() if count > plain.calls[key]}
        assert more == divided
        assert result.sent == plain.sent
        assert_near(result.tensors, plain.tensors, spec)
    # Of 5 gathers of the forward pass the output layer's is left, in 4 parts.
    key = ("forward", "all_gather")
    assert (plain.calls[key], ours[0].calls[key], few.calls[key]) == (5, 20, 8)
