"""Experts in pieces compute what Megatron's own layer does, and hide all but two collectives."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import ConfigError
from tests.moe import layer_ranks as jobs
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
SHARED = {"moe_shared_expert_intermediate_size": 20}
PIECES = [{"pipe_slices": 1}, {"pipe_slices": 3}, {"pipe_slices": 2, "pipe_chained": True}]


def check(results, exact=0):
    expected, *found = results
    for i, result in enumerate(found):
        tolerance = 0 if i < exact else 2e-6
        torch.testing.assert_close(result.output, expected.output, rtol=tolerance, atol=tolerance)
        assert result.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(result.gradients[name], gradient, rtol=2e-6, atol=2e-6)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("shared", [{}, SHARED], ids=["routed", "shared"])
def test_pieces_equal_megatrons_layer(ranks, spec, shared):
    for results in ranks(2, jobs.compare, spec, {"expert": 2}, shared, PIECES, setup=ADAPTOR):
        check(results, exact=1)


@pytest.mark.parametrize("slices", [1, 3])
def test_exposed_collectives(ranks, slices):
    for _, piped in ranks(
        2, jobs.compare, "te", {"expert": 2}, {}, [{"pipe_slices": slices}], setup=ADAPTOR
    ):
        log, last = piped.log, jobs.EXPERTS // 2 * slices - 1
        for phase in "forward", "backward":
            exchanges = [event for event in log.communications(phase) if "count" not in event.name]
            assert len(exchanges) == 2 * (last + 1)
        exposed = [(event.name, event.chunk) for event in log.exposed("forward")]
        assert exposed == [("dispatch.rows", 0), ("combine.rows", last)]
        # In backward the dispatch returns while the anchor computes weight gradients.
        assert [(event.name, event.chunk) for event in log.exposed("backward")] == [
            ("combine.rows", last)
        ]


@pytest.mark.weekly_cases("local")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["te", "local"])
def test_expert_tensor_parallelism(ranks, spec):
    layout = {"expert": 2, "tensor": 2, "expert_tensor": 2}
    for results in ranks(4, jobs.compare, spec, layout, SHARED, PIECES, setup=ADAPTOR):
        check(results)


def test_collectives_of_both_groups_are_hidden_and_chained(ranks):
    layout = {"expert": 2, "tensor": 2, "expert_tensor": 2}
    variants = [{"pipe_slices": 2}, {"pipe_slices": 2, "pipe_chained": True}]
    for _, plain, chained in ranks(4, jobs.compare, "te", layout, {}, variants, setup=ADAPTOR):
        last = jobs.EXPERTS // 2 * 2 - 1
        exposed = [(e.name, e.chunk) for e in plain.log.exposed("forward")]
        assert exposed[0] == ("dispatch.rows", 0) and exposed[-1] == ("combine.rows", last)
        assert sum("dispatch" in name or "combine" in name for name, _ in exposed) == 2
        exposed = [(e.name, e.chunk) for e in chained.log.exposed("forward")]
        assert exposed == [
            ("dispatch.rows", 0), ("dispatch.rows", 1), ("gather.rows", 0),
            ("scatter.rows", last), ("combine.rows", last - 1), ("combine.rows", last),
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "overrides", "options"),
    [
        ({"expert": 2}, {"moe_router_topk": 1, "moe_router_pre_softmax": True}, {"tokens": 1}),
        ({"expert": 2}, {"moe_router_topk": 3}, {"steps": 2}),
        ({"expert": 2}, {"moe_grouped_gemm": False}, {}),
        ({}, {}, {"steps": 2}),
        ({"expert": 2}, {"params_dtype": torch.bfloat16, "bf16": True}, {}),
        ({"expert": 2}, SHARED, {"tokens": (1, 5)}),
        ({"expert": 2}, {}, {"frozen": r"experts|linear_fc1\.weight1"}),
        ({"expert": 2}, {}, {"frozen": r"linear_fc1\.weight[02]"}),
        ({"expert": 2}, {}, {"training": False}),
        (
            {"expert": 2},
            {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
            {"crowded": True},
        ),
    ],
    ids=[
        "one token",
        "top-3",
        "sequential",
        "one rank",
        "bf16",
        "empty rank",
        "frozen",
        "some frozen",
        "evaluation",
        "two experts",
    ],
)
def test_other_layers(ranks, layout, overrides, options):
    count = layout.get("expert", 1)
    for results in ranks(
        count, jobs.compare_with, options, "te", layout, overrides, PIECES, setup=ADAPTOR
    ):
        if "bf16" in overrides:
            for result in results[1:]:
                torch.testing.assert_close(result.output, results[0].output, rtol=0.02, atol=0.06)
        else:
            check(results)


DROPPED = {"moe_expert_capacity_factor": 0.8}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("padded", [False, True], ids=["counted", "padded"])
@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
def test_dropped_tokens(ranks, padded, sliced):
    """Padded, an expert has ceil(12 x 2 / 8 x 0.8) = 3 rows; N = 2 cuts them into 2 and 1."""
    overrides = {**DROPPED, **SHARED, "moe_pad_expert_input_to_capacity": padded}
    layout = {"expert": 2, **({"tensor": 2, "expert_tensor": 2} if sliced else {})}
    pieces = [{"pipe_slices": 1}, {"pipe_slices": 2}, {"pipe_slices": 3, "pipe_chained": True}]
    for results in ranks(
        4 if sliced else 2, jobs.compare, "te", layout, overrides, pieces, setup=ADAPTOR
    ):
        check(results)
        if padded:
            assert not any("count" in event.name for event in results[1].log.events)


def test_slots_are_cut_without_a_rest():
    """Five slots in four parts: two, two and one."""
    from mindspeed.moe.dispatch.padded import PaddedDispatcher
    from mindspeed.moe.interpreter import Chunk
    from mindspeed.moe.pipe_experts import capacity_slices

    dispatcher = PaddedDispatcher(None, 1, capacity=lambda tokens: 5)
    x = torch.zeros(8, 2)
    whole = Chunk(tensors={"hidden": x, "probs": x, "routing_map": x.bool()})
    slices = capacity_slices(dispatcher, whole, 4)
    assert [one.values["slots"].capacity for one in slices] == [2, 2, 1]
    with pytest.raises(ConfigError, match="multi-data 6 is more than the 5 rows"):
        capacity_slices(dispatcher, whole, 6)
