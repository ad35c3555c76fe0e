"""Overlapped programs compute what Megatron's own layer computes, and hide its collectives."""

from __future__ import annotations

import pytest
import torch

from tests.moe import layer_ranks as jobs
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
SHARED = {"moe_shared_expert_intermediate_size": 20}
VARIANTS = [{}, {"async_permutation": True}, {"overlap": True}]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("shared", [{}, SHARED], ids=["routed", "shared"])
def test_programs_equal_megatrons_layer(ranks, spec, shared):
    for expected, *results in ranks(
        2, jobs.compare, spec, {"expert": 2}, shared, VARIANTS, setup=ADAPTOR
    ):
        for result in results:
            assert result.output.equal(expected.output)
            assert result.gradients.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                torch.testing.assert_close(result.gradients[name], gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shared", "overlapped"), [({}, (2, 1)), (SHARED, (0, 0))], ids=["routed", "shared"]
)
def test_exposed_collectives(ranks, shared, overlapped):
    """Of 3 + 2; Megatron's layer, which sends probabilities by themselves, exposes 4 + 3."""
    expected = [(3, 2), (2, 2), overlapped]
    for _, *results in ranks(2, jobs.compare, "te", {"expert": 2}, shared, VARIANTS, setup=ADAPTOR):
        for result, exposed in zip(results, expected, strict=True):
            log = result.log
            assert [len(log.communications(x)) for x in ("forward", "backward")] == [3, 2]
            assert (len(log.exposed("forward")), len(log.exposed("backward"))) == exposed


def test_the_counts_travel_while_tokens_are_permuted(ranks):
    for results in ranks(2, jobs.counted, {"expert": 2}, {}, VARIANTS, setup=ADAPTOR):
        for result, *variant in zip(results, VARIANTS, strict=True):
            events = [str(event) for event in result.log.of("forward")]
            between = events[events.index("count.counts>") + 1 : events.index("count.counts<")]
            assert between == ([] if variant == [{}] else ["permute"])
            assert result.extra["host_copies"] == 1  # what the host learns from the device


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2, "expert_tensor": 2}, {"tensor": 2, "expert": 2, "expert_tensor": 2}],
    ids=["tp2", "tp2-ep2"],
)
def test_expert_tensor_parallelism(ranks, layout, dtype):
    size, overrides = 2 * layout.get("expert", 1), {"params_dtype": dtype, **SHARED}
    for results in ranks(size, jobs.compare, "te", layout, overrides, VARIANTS, setup=ADAPTOR):
        check(*results, relative=1e-6 if dtype == torch.float32 else 1e-2)


def check(expected, *results, relative):
    """Outputs and gradients are equal up to a share of the largest element."""
    for result in results:
        assert result.gradients.keys() == expected.gradients.keys()
        pairs = [(result.output, expected.output)]
        pairs += [(result.gradients[name], g) for name, g in expected.gradients.items()]
        for actual, truth in pairs:
            torch.testing.assert_close(
                actual, truth, rtol=0, atol=relative * float(truth.abs().max())
            )


SEQUENTIAL = {"moe_grouped_gemm": False}
"""Experts one by one."""


@pytest.mark.weekly_cases(
    "trained-grouped-local",
    "trained-sequential-te",
    "partly-grouped-te",
    "partly-sequential-local",
    "frozen-grouped-local",
    "frozen-sequential-te",
)
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("experts", [{}, SEQUENTIAL], ids=["grouped", "sequential"])
@pytest.mark.parametrize(
    ("frozen", "hidden"),
    [("", True), ("weight0|local_experts.0|weight1$", True), ("experts", False)],
    ids=["trained", "partly", "frozen"],
)
def test_weight_gradients_hide_the_dispatch_for_every_kind_of_experts(
    ranks, spec, experts, frozen, hidden
):
    for results in ranks(
        2, jobs.compare, spec, {"expert": 2}, experts, VARIANTS, frozen, setup=ADAPTOR
    ):
        check(*results, relative=1e-6)
        events = [str(event) for event in results[-1].log.of("backward")]
        between = events[events.index("dispatch.rows>") + 1 : events.index("dispatch.rows<")]
        assert between == (["weight_gradients"] if hidden else [])
