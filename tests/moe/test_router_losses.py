"""Losses of a router have the same strength on any number of ranks."""

from __future__ import annotations

import pytest
import torch

from tests.moe import router_loss_ranks

KINDS = ["aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss", "deepspeed"]
LAYOUTS = {
    "tensor": ({"tensor_model_parallel_size": 2}, KINDS, 17),
    "context": ({"context_parallel_size": 2}, KINDS, 17),
    "data": ({}, ["global_aux_loss"], 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", LAYOUTS)
def test_gradients_of_the_router_equal_those_of_one_rank(ranks, parallel):
    """Without and with ``--calculate-per-token-loss``, without and with padding."""
    layout, kinds, count = LAYOUTS[parallel]
    for found in ranks(
        2, router_loss_ranks.gradients, layout, kinds, setup="tests.support.warm", timeout=120
    ):
        assert len(found) == count
        for case, (gradient, expected) in found.items():
            torch.testing.assert_close(
                gradient.double(), expected, rtol=1e-4, atol=1e-6, msg=lambda m, c=case: f"{c}: {m}"
            )


def test_the_logged_z_loss_is_the_mean_over_the_ranks(ranks):
    found = ranks(2, router_loss_ranks.logged_z_loss, setup="tests.support.warm", timeout=120)
    (first, own), (second, other) = found
    assert own != other
    assert first == second == pytest.approx((own + other) / 2, rel=1e-5)


def test_tokens_per_expert_are_counted_in_fp32_without_padding(ranks):
    (found,) = ranks(1, router_loss_ranks.counts_in_bf16, setup="tests.support.warm", timeout=120)
    assert found["weight"] == torch.bfloat16
    assert set(found["dtypes"]) == {
        "local_tokens_per_expert", "expert_bias", "global_tokens_per_expert", "ga_steps",
    }  # fmt: skip
    assert set(found["dtypes"].values()) == {torch.float32}
    assert found["bias"].eq(torch.tensor(0.001)).all()  # not rounded on the way
    assert found["counts"].tolist() == found["expected"].tolist()
    assert found["resumed"].dtype == torch.float32
    assert found["resumed"].eq(torch.tensor(0.001).bfloat16().float()).all()
