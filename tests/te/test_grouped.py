"""Grouped linear layers against one linear layer per group."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mindspeed.te import fused_experts, kernels
from mindspeed.te.grouped import GroupedLinear
from mindspeed.te.grouped_gemm import gmm
from mindspeed.testing import assert_close_with_grads

SPLITS = [3, 0, 4, 1]


def layer(**options):
    torch.manual_seed(0)
    module = GroupedLinear(4, 6, 5, **options)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_each_group_has_its_own_layer(bias, dtype):
    grouped = layer(bias=bias, params_dtype=dtype)
    parameters = [p.detach().clone().requires_grad_() for p in grouped.parameters()]
    x = torch.randn(8, 6, dtype=dtype, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    y = grouped(x, SPLITS)
    parts = [
        F.linear(rows, parameters[i], parameters[4 + i] if bias else None)
        for i, rows in enumerate(x2.split(SPLITS))
    ]
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    torch.cat(parts).backward(cotangent)
    exact = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 6e-2}
    torch.testing.assert_close(y, torch.cat(parts), **exact)
    torch.testing.assert_close(x.grad, x2.grad, **exact)
    for ours, expected in zip(grouped.parameters(), parameters, strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, **exact)
    assert not grouped.weight1.grad.any()


def test_no_tokens_at_all():
    grouped = layer()
    x = torch.randn(0, 6, requires_grad=True)
    grouped(x, [0, 0, 0, 0]).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in grouped.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_delayed_expert_gradients_call_the_accumulation_hook(fused):
    delayed = layer(fuse_wgrad_accumulation=fused, delay_wgrad_compute=True)
    plain, owned = layer(), []
    for i in range(4):
        weight = getattr(delayed, f"weight{i}")
        weight.main_grad = torch.zeros_like(weight)
        weight.grad_added_to_main_grad = False
        assert weight.skip_backward_post_hook
        assert not hasattr(getattr(delayed, f"bias{i}"), "skip_backward_post_hook")
        delayed.register_wgrad_accumulation_and_reduce_hooks(lambda w=weight: owned.append(w.grad))
    x = torch.randn(8, 6)
    delayed(x, SPLITS).square().sum().backward()
    plain(x, SPLITS).square().sum().backward()
    assert not owned
    delayed.backward_dw()
    assert len(owned) == 4
    for i, gradient in enumerate(owned):
        there = getattr(delayed, f"weight{i}").main_grad if fused else gradient
        torch.testing.assert_close(there, getattr(plain, f"weight{i}").grad)
        assert gradient is not None


@pytest.mark.parametrize("delay", [False, True])
def test_fused_weight_gradients_reach_main_grad_of_every_expert(delay):
    fused = layer(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay, bias=False)
    plain = layer(bias=False)
    before = [torch.randn_like(weight) for weight in fused.parameters()]  # of earlier micro-batches
    for weight, earlier in zip(fused.parameters(), before, strict=True):
        weight.main_grad = earlier.clone()
        weight.grad_added_to_main_grad = False
    for _ in range(2):
        x = torch.randn(8, 6)
        fused(x, SPLITS).square().sum().backward()
        plain(x, torch.tensor(SPLITS)).square().sum().backward()
        fused.backward_dw()
    parts = zip(fused.parameters(), plain.parameters(), before, strict=True)
    for ours, expected, earlier in parts:
        total = earlier + expected.grad
        torch.testing.assert_close(ours.main_grad, total, rtol=1e-6, atol=1e-5)
        assert ours.grad_added_to_main_grad


def test_return_bias_returns_one_bias_per_group():
    grouped, x = layer(return_bias=True), torch.randn(8, 6)
    y, biases = grouped(x, SPLITS)
    assert [b is getattr(grouped, f"bias{i}") for i, b in enumerate(biases)] == [True] * 4
    grouped.return_bias, grouped.apply_bias = False, False
    assert torch.equal(grouped(x, SPLITS), y)


@pytest.mark.parametrize("kernels_", [kernels, fused_experts], ids=["formula", "fused"])
@pytest.mark.parametrize("stacked", [False, True])
def test_weight_gradients_are_added_to_what_the_buffer_holds(kernels_, stacked):
    """Of every expert, and an expert without tokens keeps what it had."""
    left, right = torch.randn(8, 5), torch.randn(8, 6)
    before = torch.randn(len(SPLITS), 5, 6)
    buffers = list(before.clone()) if stacked else [part.clone() for part in before]
    kernels_.accumulate_grouped_wgrad(left, right, SPLITS, buffers)
    start = 0
    for buffer, earlier, rows in zip(buffers, before, SPLITS, strict=True):
        part = slice(start, start + rows)
        expected = earlier + left[part].T @ right[part]
        torch.testing.assert_close(buffer, expected, rtol=1e-5, atol=1e-5)
        start += rows


@pytest.mark.parametrize("trans_b", [False, True])
def test_stacked_weights(trans_b):
    sizes = torch.tensor(SPLITS)

    def loop(a, b):
        parts = a.split(SPLITS)
        return torch.cat([r @ (w.t() if trans_b else w) for r, w in zip(parts, b, strict=True)])

    shape = (4, 5, 6) if trans_b else (4, 6, 5)
    inputs = (torch.randn(8, 6).double(), torch.randn(shape).double())
    assert_close_with_grads(
        lambda a, b: gmm(a, b, sizes, trans_b), loop, inputs, rtol=0, atol=1e-12
    )


def test_splits_must_fit_the_input():
    with pytest.raises(ValueError, match=r"\[3, 0, 4\].*4 entries.*8 rows"):
        layer()(torch.randn(8, 6), [3, 0, 4])
