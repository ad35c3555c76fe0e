"""The average of the weights against its recursion."""

from __future__ import annotations

import pytest
import torch

from mindspeed.optimizer.rules import STATE, effective_decay, ema_adamw
from mindspeed.te import optimizer_policy
from mindspeed.te.optimizers import FusedAdam


@pytest.fixture
def optimizer_with(monkeypatch):
    def build(decay, params, **options):
        rule = ema_adamw(decay)
        monkeypatch.setattr(optimizer_policy, "update_rule", lambda: rule)
        return FusedAdam(params, lr=1e-2, weight_decay=0.1, **options)

    return build


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    shapes = ((5, 7), (9,))
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def grads_of(step, params):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9999, 1.0])
def test_the_average_is_the_recursion_bit_for_bit(optimizer_with, decay):
    ours, plain = parameters(), parameters()
    expected = [p.detach().clone() for p in ours]
    exact = [p.detach().double() for p in ours]
    optimizer = optimizer_with(decay, ours)
    adam = torch.optim.AdamW(plain, lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(1, 31):
        for params in (ours, plain):
            grads_of(step, params)
        optimizer.step()
        adam.step()
        kept = min(decay, (1 + step) / (10 + step))
        for p, q, e, x in zip(ours, plain, expected, exact, strict=True):
            e.mul_(kept).add_(q.detach(), alpha=1 - kept)
            x.mul_(kept).add_(q.detach().double(), alpha=1 - kept)
            assert torch.equal(p, q)
            assert torch.equal(optimizer.state[p][STATE], e)
            torch.testing.assert_close(e.double(), x, rtol=1e-5, atol=1e-6)


def test_a_resumed_run_continues_the_count(optimizer_with):
    ours = parameters()
    optimizer = optimizer_with(0.9999, ours)
    for step in range(4):
        grads_of(step, ours)
        optimizer.step()
    copies = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    resumed = optimizer_with(0.9999, copies)
    resumed.load_state_dict(optimizer.state_dict())
    for step in range(4, 8):
        for params, running in ((ours, optimizer), (copies, resumed)):
            grads_of(step, params)
            running.step()
    for p, q in zip(ours, copies, strict=True):
        assert torch.equal(optimizer.state[p][STATE], resumed.state[q][STATE])


def test_the_decay_grows_to_its_limit():
    assert effective_decay(0.9999, 1) == 2 / 11
    assert effective_decay(0.9999, 10**6) == 0.9999
