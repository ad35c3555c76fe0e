"""Layers with DeepSpeed's gate compute what the published einsums do; every dispatch alike."""

from __future__ import annotations

import pytest

from tests.moe import deepspeed_ranks as jobs
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
POSITION = {"random_tokens": False}
CASES = [
    {"gate": POSITION, "factor": 0.5},
    {"gate": POSITION, "factor": 1.5, "request": {"overlap": True}},
    {},
    {"request": {"overlap": True}},
    {"request": {"exchange": "window"}},
    {"request": {"exchange": "window", "capacity": 2, "overlap": True}},
]
EP2, EP2_TP2 = {"expert": 2}, {"expert": 2, "tensor": 2, "expert_tensor": 1}
SEQUENTIAL = {"moe_grouped_gemm": False}


@pytest.mark.weekly_cases("ep-local-2", "ep-tp-1", "ep4-2")
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize(
    ("ranks_", "spec", "layout", "overrides"),
    [
        pytest.param(2, "te", EP2, {}, id="ep"),
        pytest.param(1, "local", {}, SEQUENTIAL, id="one-rank"),
        pytest.param(2, "local", EP2, SEQUENTIAL, id="ep-local", marks=pytest.mark.slow),
        pytest.param(4, "te", EP2_TP2, {}, id="ep-tp", marks=pytest.mark.slow),
        pytest.param(4, "te", {"expert": 4}, {}, id="ep4", marks=pytest.mark.slow),
    ],
)
def test_outputs_gradients_and_losses(ranks, ranks_, spec, layout, overrides, topk):
    overrides = {**overrides, "moe_router_topk": topk}
    for results in ranks(
        ranks_, jobs.against_einsums, spec, layout, overrides, CASES, setup=ADAPTOR
    ):
        assert [bool(result.dropped) for result in results][::2] == [True, False, False]
        for number, result in enumerate(results):
            for name, expected in result.expected.items():
                error = (result.found[name] - expected).abs().max() / expected.abs().max()
                assert error < 2e-6, (number, name, error)
            logged = result.losses["load_balancing_loss"]
            assert logged == pytest.approx(result.losses["expected"], rel=1e-5)
            assert result.losses["z_loss"] > 0
