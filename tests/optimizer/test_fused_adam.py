"""``FusedAdam``: one operator per group and dtype; other storages of states and gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.optimizer import block_fp8
from mindspeed.optimizer.remainder import Remainder
from mindspeed.te import optimizer_policy, stored_states
from mindspeed.te.optimizers import FusedAdam


class Launches(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


def parameters(count, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(13, 7), (5,), (1,), (64, 3)]
    values = [torch.randn(*shapes[i % 4], generator=generator).to(dtype) for i in range(count)]
    return [torch.nn.Parameter(value) for value in values]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.mark.parametrize("count", [4, 40])
def test_a_step_launches_one_operator_per_group_and_dtype(count):
    one, two = parameters(count), parameters(count, torch.float64)
    groups = [{"params": [*one, *two]}, {"params": (three := parameters(count)), "lr": 1e-3}]
    optimizer = FusedAdam(groups, lr=1e-2, weight_decay=0.1)
    set_gradients([*one, *two, *three], 0)
    optimizer.step()  # creates the states
    with Launches() as launches:
        optimizer.step()
    assert launches.count["aten::_fused_adamw_"] == 3
    assert sum(launches.count.values()) <= 3 * 3 + 3 * count  # views of parameters are no kernels


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_it_equals_the_reference_loop(decoupled):
    ours, theirs = parameters(8), parameters(8)
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    fused = FusedAdam(ours, adam_w_mode=decoupled, **options)
    loop = kind(theirs, foreach=False, fused=False, **options)
    for step in range(20):
        for params, optimizer in ((ours, fused), (theirs, loop)):
            set_gradients(params, step)
            optimizer.step()
    a, b = (torch.cat([p.detach().flatten() for p in params]) for params in (ours, theirs))
    assert (a - b).norm() <= 1e-7 * b.norm()


F8 = torch.uint8
STORAGES = {
    "remainder": {"store_param_remainders": True},
    "bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp8": {"exp_avg_dtype": F8, "exp_avg_sq_dtype": F8},
    "fp32": {},
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("size", [256, 512])
def test_large_parameters_are_updated_in_parts_to_the_same_bits(monkeypatch, storage, size):
    monkeypatch.setattr(block_fp8, "SMALL", 0)

    def trained():
        torch.manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(n).bfloat16()) for n in (1000, 2048, 3, 0)]
        params.append(torch.nn.Parameter(torch.randn(40, 30).bfloat16().t()))  # not contiguous
        optimizer = FusedAdam(
            params, lr=1e-2, master_weights=True, use_decoupled_grad=True, **STORAGES[storage]
        )
        for _ in range(4):
            for p in params:
                p.decoupled_grad = torch.randn(p.shape).half()
            optimizer.step()
        return params, [
            optimizer.get_unscaled_state(p, n) for p in params for n in optimizer.state[p]
        ]

    whole = trained()
    monkeypatch.setattr(stored_states, "PART", size)
    parts = trained()
    for one, other in zip(whole, parts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_part_bounds_what_is_decoded_at_once(monkeypatch):
    monkeypatch.setattr(stored_states, "PART", 1024)
    param = torch.nn.Parameter(torch.zeros(10_000).bfloat16())
    optimizer = FusedAdam([param], master_weights=True, use_decoupled_grad=True)
    param.decoupled_grad = torch.ones(10_000)
    sizes = []
    update = optimizer._update
    monkeypatch.setattr(
        optimizer,
        "_update",
        lambda group, w, *rest: (sizes.append(w[0].numel()), update(group, w, *rest)),
    )
    optimizer.step()
    assert sizes == [1024] * 9 + [784]


def test_factors_of_gradients_are_multiplied_in_fp32_and_in_order():
    def stepped(grad, factors):
        param = torch.nn.Parameter(torch.ones(100).half())
        optimizer = FusedAdam([param], master_weights=True, use_decoupled_grad=True, eps=1e-3)
        param.decoupled_grad, optimizer.grad_factors = grad, factors
        optimizer.step()
        return optimizer.state[param]["exp_avg"]

    grad = torch.randn(100).half()
    expected = grad.float() * 0.3 * 0.7
    kept = grad.clone()
    assert torch.equal(stepped(grad, (torch.tensor([0.3]), 0.7)), stepped(expected, ()))
    assert torch.equal(grad, kept)


def regression(**options):
    """Losses of a small network on noisy data, and the largest update per learning rate."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1, bias=False)
    )
    target, lr = torch.randn(32, 1), 2e-3
    optimizer = FusedAdam(net.parameters(), lr=lr, betas=(0.9, 0.999), **options)
    losses, largest = [], 0.0
    for _ in range(200):
        x = torch.randn(256, 32) * torch.logspace(-3, 0, 32)
        loss = (net(x) - (x @ target).sin() - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.step()
        moved = [
            (p.detach() - b).abs().max() for p, b in zip(net.parameters(), before, strict=True)
        ]
        largest = max(largest, max(moved).item() / lr)
        losses.append(loss.item())
    return losses, largest


def test_fp8_states_train_like_fp32_ones():
    plain, _ = regression()
    narrow, largest = regression(exp_avg_dtype=F8, exp_avg_sq_dtype=F8)
    assert largest <= 3
    assert plain[-1] < 0.9 * plain[0]
    assert sum(narrow[-20:]) == pytest.approx(sum(plain[-20:]), rel=5e-3)


def zipf_training(mark, exempt, **options):
    """Movement of the rows of an embedding, rare ones apart, and the losses, on Zipf's tokens."""
    torch.manual_seed(0)
    tokens, width = 512, 16
    embedding, head = torch.nn.Embedding(tokens, width), torch.nn.Linear(width, tokens)
    embedding.weight.rare_gradients = mark
    params = [*embedding.parameters(), *head.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        if not exempt:
            patch.setattr(optimizer_policy, "keeps_fp32", lambda param: False)
        optimizer = FusedAdam(params, lr=2e-3, betas=(0.9, 0.95), **options)
    chance = 1 / torch.arange(1, tokens + 1)
    start, losses = embedding.weight.detach().clone(), []
    for _ in range(400):
        read = torch.multinomial(chance, 64, replacement=True)
        loss = torch.nn.functional.cross_entropy(head(embedding(read)), (read * 7 + 3) % tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    moved = (embedding.weight.detach() - start).abs().mean(1)
    kinds = {optimizer.state[p]["exp_avg"].dtype for p in embedding.parameters()}
    return moved[:64].mean().item(), moved[64:].mean().item(), sum(losses[-50:]) / 50, kinds


@pytest.mark.slow
@pytest.mark.parametrize("exempt", [True, False], ids=["exempt", "all"])
def test_rare_tokens_train_as_with_fp32_states(exempt):
    expected = zipf_training(True, exempt)
    found = zipf_training(True, exempt, exp_avg_dtype=F8, exp_avg_sq_dtype=F8)
    assert found[3] == {torch.float32 if exempt else torch.float8_e4m3fn}
    assert found[0] == pytest.approx(expected[0], rel=0.02)
    assert found[1] == pytest.approx(expected[1], rel=0.05)
    assert found[2] == pytest.approx(expected[2], rel=0.02)


def trained_weights(remainder):
    """bf16 weights and fp32 master weights after 300 steps on 65,536 weights."""
    torch.manual_seed(5)
    param = torch.nn.Parameter((torch.randn(65536) * 0.02).bfloat16())
    options = {"lr": 1e-3, "weight_decay": 0.1, "use_decoupled_grad": True, "master_weights": True}
    optimizer = FusedAdam([param], store_param_remainders=remainder, **options)
    generator = torch.Generator().manual_seed(7)
    for _ in range(300):
        param.decoupled_grad = torch.randn(65536, generator=generator) * 1e-3 + param.detach()
        optimizer.step()
    return param.detach(), optimizer.get_unscaled_state(param, "master_param")


def test_300_steps_with_remainders_end_with_the_weights_of_master_weights(monkeypatch):
    """Rounding half away from zero would give 40 other weights."""
    param, master = trained_weights(remainder=False)
    rounded, _ = trained_weights(remainder=True)
    assert (rounded != param).sum() <= 4
    monkeypatch.setattr(optimizer_policy, "remainder_codec", lambda: Remainder(exact=True))
    exact, whole = trained_weights(remainder=True)
    assert torch.equal(exact, param) and torch.equal(whole, master)
