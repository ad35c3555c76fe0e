"""A rank or an expert without rows: every operator, and what moves rows to experts."""

from __future__ import annotations

import pytest
import torch

from mindspeed.ops.catalog import operators
from mindspeed.te import fused_experts, kernels, permutation


def samples_with_rows(operator):
    """Samples whose first argument has several rows; a single one may be any other size."""
    found = operator.samples(torch.float32)
    return [x for x in found if isinstance(x[0], torch.Tensor) and x[0].dim() and x[0].shape[0] > 1]


SEQUENCES = {
    *("attention", "attention_backward", "ring_attention_update"),  # a rank always has some
    # Borders of documents are arguments of their own; samples of these have documents of no token.
    *("delta_scan", "gated_delta_rule", "gated_delta_rule_backward"),
}
OPERATORS = {
    operator.name: operator
    for operator in operators()
    if operator.name not in SEQUENCES and samples_with_rows(operator)  # not those of a group
}
TOKENS = {"moe_unpermute": 1, "moe_unpermute_backward": 2}  # position of an argument with tokens
COPIES = {"moe_permute": (2,)}  # positions of numbers of rows


def without_rows(operator, sample):
    """The sample without the rows of its first argument, and without tokens."""
    counts = {sample[0].shape[0], sample[TOKENS.get(operator.name, 0)].shape[0]}
    changed = []
    for position, value in enumerate(sample):
        if position in COPIES.get(operator.name, ()):
            changed.append(0)
        elif not isinstance(value, torch.Tensor) or not value.dim():
            changed.append(value)
        elif value.shape[0] in counts:
            changed.append(value[:0])
        else:  # sizes of groups
            changed.append(torch.zeros_like(value) if value.dtype == torch.int64 else value)
    return tuple(changed)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_take_zero_rows_forward_and_backward(name):
    operator = OPERATORS[name]
    for sample in samples_with_rows(operator):
        arguments = without_rows(operator, sample)
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
        if operator.differentiable:
            for x in arguments:
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    x.requires_grad_()
        results = operator(*arguments)
        results = [x for x in (results if isinstance(results, tuple | list) else [results])
                   if isinstance(x, torch.Tensor)]  # fmt: skip
        assert all(not x.numel() or not x.any() for x in results if x.is_floating_point())
        for position in operator.mutated():
            assert torch.equal(arguments[position], before[position])
        found = [x for x in results if x.requires_grad]
        if found:
            sum(x.sum() for x in found).backward()
        for x in arguments:
            if isinstance(x, torch.Tensor) and x.grad is not None:
                assert x.grad.shape == x.shape
                assert not x.grad.any()


@pytest.mark.parametrize("module", [kernels, fused_experts], ids=["plain", "fused"])
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_experts_may_be_none(monkeypatch, module, tokens, dtype):
    """No tokens, or tokens that no expert of this rank gets."""
    for name in ("permute", "unpermute", "sort_chunks"):
        wanted = f"moe_{name}" if module is kernels else name
        monkeypatch.setattr(kernels, f"moe_{name}", getattr(module, wanted))
    x = torch.randn(tokens, 16, dtype=dtype, requires_grad=True)
    probs = torch.rand(tokens, 4, requires_grad=True)
    routed = torch.zeros(tokens, 4, dtype=torch.bool)
    sizes, order = [0, 0, 0, 0], [0, 2, 1, 3]
    for rows in (None, 0):
        moved, weights, row_map = permutation.moe_permute_with_probs(x, probs, routed, rows)
        assert moved.shape == (0, 16) and weights.shape == (0,)
        moved, weights = permutation.moe_sort_chunks_by_index_with_probs(
            moved, weights, sizes, order
        )
        assert moved.shape == (0, 16) and weights.shape == (0,)
        (moved,) = (permutation.moe_sort_chunks_by_index(moved, sizes, order),)
        for given in (None, probs):
            out = permutation.moe_unpermute(moved * weights.unsqueeze(1).to(dtype), row_map, given,
                                            (tokens, 16))  # fmt: skip
            assert out.shape == (tokens, 16) and not out.any()
            out.sum().backward(retain_graph=True)
    for leaf in (x, probs):
        assert leaf.grad is None or not leaf.grad.any()
