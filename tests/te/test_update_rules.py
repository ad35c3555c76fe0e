"""Another update rule and another state storage in ``FusedAdam``, and around it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.optimizer.codecs import BFloat16, Full, StateCodec
from mindspeed.optimizer.rules import ADAM, UpdateRule
from mindspeed.te.optimizers import FusedAdam
from tests.support.seams import fresh_seams


def sign_of_momentum(weights, grads, states, options):
    """Lion with one moment, and an exponential mean of the weights."""
    for w, g, m, ema in zip(weights, grads, states["exp_avg"], states["ema"], strict=True):
        m.lerp_(g, 1 - options.betas[0])
        w.mul_(1 - options.lr * options.weight_decay).sub_(m.sign(), alpha=options.lr)
        ema.lerp_(w, 0.1)


SIGN = UpdateRule({"exp_avg": torch.zeros_like, "ema": torch.clone}, sign_of_momentum)


class Halved(StateCodec):
    """Stores half of the state in bf16 on the host, with one scale per row, to be unlike others."""

    def allocate(self, param):
        return torch.empty(param.shape, dtype=torch.bfloat16, device="cpu")

    def allocate_extra(self, param):
        return torch.ones(param.shape[0], dtype=torch.float32)

    def decode(self, stored, scale, param):
        return (stored.float() * scale.view(-1, *[1] * (stored.dim() - 1))).to(param.device)

    def encode(self, value, stored, scale, param):
        scale.fill_(2.0)
        stored.copy_(value / 2)


@pytest.fixture
def seams():
    with fresh_seams() as seams:
        yield seams


def fresh(dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(*shape).to(dtype)) for shape in ((5, 3), (4,))]


def run(optimizer, parameters, steps, start=0):
    for step in range(start, start + steps):
        torch.manual_seed(step)
        for p in parameters:
            grad = torch.randn(p.shape)
            p.decoupled_grad, p.grad = grad, grad.to(p.dtype)
        optimizer.step()


def expected(steps, beta=0.9, lr=0.1, decay=0.01):
    weights = [p.detach() for p in fresh()]
    moments = [torch.zeros_like(w) for w in weights]
    means = [w.clone() for w in weights]
    for step in range(steps):
        torch.manual_seed(step)
        for w, m, e in zip(weights, moments, means, strict=True):
            m.mul_(beta).add_(torch.randn(w.shape), alpha=1 - beta)
            w.copy_(w - lr * decay * w - lr * torch.sign(m))
            e.add_(0.1 * (w - e))
    return weights, moments, means


def test_a_custom_update_rule_trains_and_keeps_its_state(seams):
    seams.use_kernels(owner="test", update_rule=lambda: SIGN)
    parameters = fresh()
    optimizer = FusedAdam(parameters, lr=0.1, weight_decay=0.01)
    run(optimizer, parameters, 4)
    for p, w, m, e in zip(parameters, *expected(4), strict=True):
        torch.testing.assert_close(p.detach(), w)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], m)
        torch.testing.assert_close(optimizer.state[p]["ema"], e)
        assert optimizer.state[p]["exp_avg_sq"].numel() == 0  # Megatron's name, no memory
        assert optimizer.get_unscaled_state(p, "exp_avg_sq").equal(torch.zeros_like(p))


def test_the_choice_is_made_when_the_optimizer_is_built_and_taken_back(seams):
    before = FusedAdam(fresh())
    seams.use_kernels(owner="test", update_rule=lambda: SIGN)
    assert FusedAdam(fresh())._rule is SIGN and before._rule is ADAM
    seams.clear()
    assert FusedAdam(fresh())._rule is ADAM


@pytest.mark.parametrize("storage", [BFloat16, Halved])
@pytest.mark.parametrize("master", [False, True], ids=["fp32", "bf16-master"])
def test_states_of_another_storage_resume_bit_for_bit(seams, storage, master):
    seams.use_kernels(
        owner="test",
        update_rule=lambda: SIGN,
        state_codec=lambda name, dtype: storage() if name == "exp_avg" else Full(),
    )
    options = {"lr": 0.1, "master_weights": master, "use_decoupled_grad": master}
    dtype = torch.bfloat16 if master else torch.float32
    first, second = fresh(dtype), fresh(dtype)
    one = FusedAdam(first, **options)
    run(one, first, 3)
    assert all(one.state[p]["exp_avg"].dtype == torch.bfloat16 for p in first)
    saved = one.state_dict()
    assert {t.dtype for state in saved["state"].values() for t in state.values()} == {torch.float32}
    two = FusedAdam(second, **options)
    for p, q in zip(first, second, strict=True):
        q.data.copy_(p.data)
    two.load_state_dict(saved)
    run(one, first, 2, start=3)
    run(two, second, 2, start=3)
    for p, q in zip(first, second, strict=True):
        assert p.equal(q)
        for name in one.state[p]:
            assert one.get_unscaled_state(p, name).equal(two.get_unscaled_state(q, name))


def test_moments_that_megatron_creates_become_those_of_the_rule(seams):
    """Megatron fills empty states with moments in fp32 before it loads a checkpoint."""
    seams.use_kernels(
        owner="test", update_rule=lambda: SIGN, state_codec=lambda name, dtype: BFloat16()
    )
    (p, q) = fresh()
    optimizer = FusedAdam([p, q], lr=0.1)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name] = torch.full_like(p, 0.5)
    state = optimizer.state_dict()["state"][0]
    assert set(state) == {"exp_avg", "exp_avg_sq", "ema"}
    assert state["exp_avg"].equal(torch.full_like(p, 0.5)) and not state["exp_avg_sq"].any()
    torch.testing.assert_close(state["ema"], p.detach(), rtol=2**-8, atol=0)
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16


def test_nvidias_adam_refuses_a_rule(seams, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    with pytest.raises(
        ConfigError, match=r"test changes the update rule .* MINDSPEED_TE=substitute"
    ):
        seams.use_kernels(owner="test", update_rule=lambda: SIGN)
