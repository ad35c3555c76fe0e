"""Moving tokens to experts and back, against loops over tokens and experts."""

from __future__ import annotations

import pytest
import torch

from mindspeed.te import fused_experts, kernels
from mindspeed.te import permutation as p
from mindspeed.testing import assert_close_with_grads

TOKENS, EXPERTS, HIDDEN = 6, 4, 3


@pytest.fixture(params=["plain", "fused"], autouse=True)
def implementation(request, monkeypatch):
    if request.param == "fused":
        for name in ("permute", "unpermute", "sort_chunks"):
            monkeypatch.setattr(kernels, f"moe_{name}", getattr(fused_experts, name))


def routing(full=False):
    torch.manual_seed(0)
    choice = torch.rand(TOKENS, EXPERTS).topk(2, dim=-1).indices
    routed = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, choice, True)
    routed[2] = False
    return routed


def pairs(routed):
    return [(t, e) for e in range(EXPERTS) for t in range(TOKENS) if routed[t, e]]


@pytest.mark.parametrize("extra", [None, -1, 0, 3, -4], ids=["none", "all", "exact", "pad", "cut"])
def test_permutation_with_probabilities(extra):
    routed = routing()
    order = pairs(routed)
    rows = None if extra is None else -1 if extra == -1 else len(order) + extra

    def loop(x, probs):
        kept = order if rows is None or rows < 0 else order[:rows]
        tail = max((rows or 0) - len(order), 0)
        tokens = torch.stack([x[t] for t, _ in kept] + [torch.zeros(HIDDEN)] * tail)
        weights = torch.stack([probs[t, e] for t, e in kept] + [torch.zeros(())] * tail)
        return tokens, weights

    def ours(x, probs):
        tokens, weights, _ = p.moe_permute_with_probs(x, probs, routed, rows)
        alone, _ = p.moe_permute(x, routed, rows)
        assert torch.equal(alone, tokens)
        return tokens, weights

    inputs = (torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, EXPERTS))
    assert_close_with_grads(ours, loop, inputs, rtol=0, atol=0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tail", [0, 3])
def test_unpermutation_sums_the_rows_of_each_token(weighted, tail):
    routed = routing()
    order = pairs(routed)
    rows = len(order) + tail
    _, row_map = p.moe_permute(torch.zeros(TOKENS, HIDDEN), routed, rows)

    def loop(y, probs):
        out = [torch.zeros(HIDDEN, dtype=y.dtype) for _ in range(TOKENS)]
        for row, (t, e) in enumerate(order):
            out[t] = out[t] + y[row] * (probs[t, e] if weighted else 1 + 0 * probs[t, e])
        return torch.stack(out) + 0 * probs.sum()

    def ours(y, probs):
        out = p.moe_unpermute(
            y, row_map, merging_probs=probs if weighted else None, restore_shape=(TOKENS, HIDDEN)
        )
        return out + 0 * probs.sum()

    inputs = (torch.randn(rows, HIDDEN).double(), torch.rand(TOKENS, EXPERTS).double())
    assert_close_with_grads(ours, loop, inputs, rtol=0, atol=1e-12)


def test_unpermutation_of_bf16_sums_in_the_precision_of_the_probabilities():
    routed = torch.ones(1, EXPERTS, dtype=torch.bool)
    rows = torch.tensor([[256.0], [1.0], [1.0], [1.0]]).bfloat16()
    _, row_map = p.moe_permute(torch.zeros(1, 1), routed)
    out = p.moe_unpermute(rows, row_map, torch.ones(1, EXPERTS), (1, 1))
    assert out.dtype == torch.bfloat16
    assert out.item() == torch.tensor(259.0).bfloat16().item() != 256.0


@pytest.mark.parametrize("as_tensor", [False, True])
def test_chunks_are_reordered_with_their_probabilities(as_tensor):
    sizes, order = [2, 0, 3, 1], [3, 1, 0, 2]
    arguments = (torch.tensor(sizes), torch.tensor(order)) if as_tensor else (sizes, order)
    x, probs = torch.arange(12.0).view(6, 2), torch.arange(6.0)
    rows = [5, 0, 1, 2, 3, 4]
    y, moved = p.moe_sort_chunks_by_index_with_probs(x, probs, *arguments)
    assert torch.equal(y, x[rows])
    assert torch.equal(moved, probs[rows])
    assert torch.equal(p.moe_sort_chunks_by_index(x, *arguments), y)


def test_index_maps_are_refused():
    with pytest.raises(NotImplementedError, match="mask"):
        p.moe_permute(torch.zeros(2, 2), torch.zeros(2, 2), map_type="index")
