"""Routing functions against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from mindspeed.te import router
from mindspeed.testing import assert_close_with_grads

TOKENS, EXPERTS = 9, 8


def chosen_by_hand(scores, topk, groups, group_topk):
    scores = scores.tolist()
    allowed = range(EXPERTS)
    if group_topk:
        width = EXPERTS // groups
        best = [
            sum(sorted(scores[g * width : (g + 1) * width])[-(topk // group_topk) :])
            for g in range(groups)
        ]
        kept = sorted(range(groups), key=lambda g: best[g])[-group_topk:]
        allowed = [e for e in range(EXPERTS) if e // width in kept]
    return sorted(allowed, key=lambda e: scores[e])[-topk:]


def route(logits, topk, pre, groups, group_topk, factor, function, bias):
    rows = []
    for row in logits:
        scores = row.sigmoid() if function == "sigmoid" else row.softmax(-1) if pre else row
        shifted = scores.detach() if bias is None else scores.detach() + bias
        experts = chosen_by_hand(shifted, topk, groups, group_topk)
        probs = scores[experts]
        if function == "sigmoid" and topk > 1:
            probs = probs / probs.sum()
        elif function == "softmax" and not pre:
            probs = probs.softmax(-1)
        empty = torch.zeros(EXPERTS, dtype=row.dtype)
        rows.append(empty.index_put((torch.tensor(experts),), probs * factor))
    return torch.stack(rows)


@pytest.mark.parametrize("function", ["softmax-pre", "softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "group_topk"), [(None, None), (4, 2)])
@pytest.mark.parametrize(("topk", "factor"), [(2, 1.0), (4, 2.5)])
def test_topk_routing(function, groups, group_topk, topk, factor):
    torch.manual_seed(0)
    name, _, pre = function.partition("-")
    bias = torch.randn(EXPERTS) if name == "sigmoid" else None
    options = (topk, bool(pre), groups, group_topk, factor, name, bias)
    assert_close_with_grads(
        lambda x: router.fused_topk_with_score_function(x, *options)[0],
        lambda x: route(x, *options),
        (torch.randn(TOKENS, EXPERTS),),
        rtol=0,
        atol=1e-6,
    )
    logits = torch.randn(3, TOKENS, EXPERTS)
    probs, routed = router.fused_topk_with_score_function(logits, *options)
    assert routed.shape == logits.shape
    assert torch.equal(routed, probs > 0)
    assert (routed.sum(-1) == topk).all()


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_scores_for_the_auxiliary_loss_are_normalised(function):
    logits = torch.randn(TOKENS, EXPERTS)
    routed, scores = router.fused_compute_score_for_moe_aux_loss(logits, 3, function)
    torch.testing.assert_close(scores.sum(-1), torch.ones(TOKENS))
    assert torch.equal(routed, scores >= scores.topk(3).values[:, -1:])


def test_auxiliary_loss_of_a_perfect_balance_is_the_coefficient():
    probs = torch.full((TOKENS, EXPERTS), 1 / EXPERTS)
    counts = torch.full((EXPERTS,), TOKENS * 2 / EXPERTS)
    loss = router.fused_moe_aux_loss(probs, counts, TOKENS, EXPERTS, 2, coeff=0.01)
    assert loss.item() == pytest.approx(0.01)


def test_unknown_score_functions_are_named():
    with pytest.raises(ValueError, match="tanh"):
        router.fused_compute_score_for_moe_aux_loss(torch.zeros(2, 2), 1, "tanh")
