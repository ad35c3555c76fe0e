"""Cross entropy over a whole and a split vocabulary against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed.te.cross_entropy import parallel_cross_entropy

VOCABULARY = 12


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 2, VOCABULARY, generator=generator) * 3
    target = torch.randint(VOCABULARY, (5, 2), generator=generator)
    target[1, 0] = -100
    return logits.to(dtype), target


def split_loss(smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of every token and the gradient of this rank's slice of the logits."""
    logits, target = inputs()
    part = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
    loss = parallel_cross_entropy(part, target, smoothing, False, dist.group.WORLD)
    loss.backward(torch.arange(10.0).view(5, 2))
    return loss.detach(), part.grad


def expected(smoothing, dtype=torch.float32):
    logits, target = inputs(dtype)
    logits = logits.float().requires_grad_()
    loss = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing
    ).view(5, 2)
    loss.backward(torch.arange(10.0).view(5, 2))
    return loss.detach(), logits.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("world_size", [1, 2])
def test_loss_and_gradient_equal_torch(ranks, world_size, smoothing):
    results = ranks(world_size, split_loss, smoothing)
    loss, grad = expected(smoothing)
    for part, _ in results:
        torch.testing.assert_close(part, loss, rtol=0, atol=2e-6)
    joined = torch.cat([g for _, g in results], -1)
    torch.testing.assert_close(joined, grad, rtol=0, atol=2e-6)


def test_bf16_logits_give_an_fp32_loss_and_bf16_gradients():
    logits, target = inputs(torch.bfloat16)
    logits = logits.requires_grad_()
    loss = parallel_cross_entropy(logits, target)
    loss.backward(torch.arange(10.0).view(5, 2))
    value, grad = expected(0.0, torch.bfloat16)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, value, rtol=0, atol=2e-6)
    torch.testing.assert_close(logits.grad, grad.bfloat16(), rtol=1e-2, atol=1e-6)


def test_mean_over_the_tokens_that_count():
    logits, target = inputs()
    mean = parallel_cross_entropy(logits, target, reduce_loss=True)
    torch.testing.assert_close(mean, F.cross_entropy(logits.flatten(0, 1), target.flatten()))
