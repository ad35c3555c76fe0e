"""FusedAdam against torch's optimizers; storage of states; list operations."""

from __future__ import annotations

import copy

import pytest
import torch

from mindspeed.optimizer import block_fp8
from mindspeed.te.optimizers import (
    FusedAdam,
    FusedSGD,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
)

F8 = torch.uint8


def steps(optimizer, parameters, count, seed=0, decoupled=False):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in parameters:
            grad = torch.randn(p.shape, generator=generator)
            if decoupled:
                p.decoupled_grad = grad
            else:
                p.grad = grad.to(p.dtype)
        optimizer.step()


def fresh(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [
        torch.nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))
        for shape in ((33, 7), (5,), (1,))
    ]


@pytest.mark.parametrize("decoupled_decay", [True, False], ids=["adamw", "adam-l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_adam_equals_torch(decoupled_decay, dtype):
    ours, theirs = fresh(dtype), fresh(dtype)
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    kind = torch.optim.AdamW if decoupled_decay else torch.optim.Adam
    steps(FusedAdam(ours, adam_w_mode=decoupled_decay, **options), ours, 25)
    steps(kind(theirs, **options), theirs, 25)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=5e-7 if dtype == torch.float32 else 1e-13)


def test_without_bias_correction_the_first_step_is_the_plain_formula():
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = FusedAdam([p], lr=0.1, bias_correction=False)
    p.grad = torch.tensor([0.5, -4.0])
    optimizer.step()
    m, v = 0.1 * p.grad, 0.001 * p.grad.square()
    expected = torch.tensor([1.0, -2.0]) - 0.1 * m / (v.sqrt() + 1e-8)
    torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=1e-7)


def test_state_has_megatrons_keys_and_step_lives_in_the_group():
    parameters = fresh()
    optimizer = FusedAdam([{"params": parameters}, {"params": []}], lr=1e-2)
    steps(optimizer, parameters, 3)
    assert all(set(optimizer.state[p]) == {"exp_avg", "exp_avg_sq"} for p in parameters)
    assert optimizer.param_groups[0]["step"] == 3
    assert "step" not in optimizer.param_groups[1]


VARIANTS = {
    "fp32": ({}, 3e-7),
    "remainder": ({"store_param_remainders": True}, 3e-7),
    "bf16-moments": ({"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}, 1e-3),
    "fp16-moments": ({"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}, 2e-4),
    "fp8-exp-avg": ({"exp_avg_dtype": F8, "exp_avg_sq_dtype": torch.float16}, 1e-2),
    "fp8": ({"exp_avg_dtype": F8, "exp_avg_sq_dtype": F8}, 1.5e-2),
    "fp16-master": ({"master_weight_dtype": torch.float16}, 6e-3),
}


@pytest.fixture
def small_in_fp8(monkeypatch):
    """Let parameters of a few elements have moments in fp8, too."""
    monkeypatch.setattr(block_fp8, "SMALL", 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_master_weights_follow_fp32_training(variant, small_in_fp8):
    options, tolerance = VARIANTS[variant]
    ours, theirs = fresh(torch.bfloat16), [p.detach().float() for p in fresh(torch.bfloat16)]
    optimizer = FusedAdam(ours, lr=1e-2, master_weights=True, use_decoupled_grad=True, **options)
    theirs = [p.requires_grad_() for p in theirs]
    steps(optimizer, ours, 10, decoupled=True)
    steps(torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.0), theirs, 10)
    for p, expected in zip(ours, theirs, strict=True):
        master = optimizer.get_unscaled_state(p, "master_param")
        assert master.dtype == torch.float32
        torch.testing.assert_close(master, expected.detach(), rtol=0, atol=tolerance)
        torch.testing.assert_close(p.float(), master, rtol=2**-8, atol=0)


def test_bf16_parameters_without_master_are_updated_in_fp32():
    ours = fresh(torch.bfloat16)
    before = [p.detach().float() for p in ours]
    optimizer = FusedAdam(ours, lr=1e-2)
    steps(optimizer, ours, 1)
    for p, x in zip(ours, before, strict=True):
        x = x.requires_grad_()
        x.grad = p.grad.float()
        torch.optim.AdamW([x], lr=1e-2, weight_decay=0.0).step()
        assert torch.equal(p.detach(), x.detach().bfloat16())


@pytest.mark.parametrize("variant", [*VARIANTS, "no-master"])
@pytest.mark.parametrize("initialised", [False, True])
def test_state_dict_round_trip_continues_identically(variant, initialised, small_in_fp8):
    options = {} if variant == "no-master" else VARIANTS[variant][0]
    options = {
        "lr": 1e-2,
        "master_weights": variant != "no-master",
        "use_decoupled_grad": True,
        **options,
    }
    first = fresh(torch.bfloat16)
    optimizer = FusedAdam(first, **options)
    steps(optimizer, first, 4, decoupled=True)
    saved = copy.deepcopy(optimizer.state_dict())
    assert {t.dtype for s in saved["state"].values() for t in s.values()} == {torch.float32}
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    resumed = FusedAdam(second, **options)
    if initialised:
        for p in second:
            resumed.initialize_state(p)
    resumed.load_state_dict(saved)
    for p, q in zip(first, second, strict=True):
        assert {n: t.dtype for n, t in optimizer.state[p].items()} == {
            n: t.dtype for n, t in resumed.state[q].items()
        }
    steps(optimizer, first, 3, seed=9, decoupled=True)
    steps(resumed, second, 3, seed=9, decoupled=True)
    for p, q in zip(first, second, strict=True):
        assert torch.equal(p, q)
        for name in optimizer.state[p]:
            a, b = (o.get_unscaled_state(x, name) for o, x in ((optimizer, p), (resumed, q)))
            assert torch.equal(a, b), name


def test_set_scaled_state_ignores_names_it_does_not_store():
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = FusedAdam([p])
    optimizer.set_scaled_state(p, "padding", False)
    optimizer.set_scaled_state(p, "exp_avg", torch.ones(3))
    assert set(optimizer.state[p]) == {"exp_avg"}


def test_capturable_keeps_step_and_lr_as_tensors_and_skips_overflows():
    class Scaler:
        inf = 1.0

        def _check_inf_per_device(self, optimizer):
            return {torch.device("cpu"): torch.tensor([self.inf])}

        def _get_scale_async(self):
            return torch.tensor(4.0)

    scaler = Scaler()
    ours, theirs = fresh(), fresh()
    optimizer = FusedAdam(ours, lr=1e-2, capturable=True)
    for p in ours:
        p.grad = torch.full_like(p, 8.0)
    optimizer.step(grad_scaler=scaler)
    assert optimizer.param_groups[0]["step"].item() == 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    scaler.inf = 0.0
    optimizer.step(grad_scaler=scaler)
    for p in theirs:
        p.grad = torch.full_like(p, 2.0)
    torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.0).step()
    assert optimizer.param_groups[0]["step"].item() == 1
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"exp_avg_dtype": torch.int32},
        {"master_weights": True, "master_weight_dtype": torch.bfloat16},
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(RuntimeError, match="FusedAdam"):
        FusedAdam(fresh(), **options)


def test_fused_sgd_equals_torch():
    ours, theirs = fresh(), fresh()
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    steps(FusedSGD(ours, **options), ours, 5)
    steps(torch.optim.SGD(theirs, foreach=False, **options), theirs, 5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_l2norm_of_lists():
    overflow = torch.zeros(1, dtype=torch.int32)
    tensors = [torch.randn(7, 3), torch.randn(4).bfloat16()]
    total, each = multi_tensor_applier(multi_tensor_l2norm, overflow, [tensors], True)
    expected = torch.cat([t.double().flatten() for t in tensors]).norm()
    torch.testing.assert_close(total.double(), expected.view(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(each[1], tensors[1].float().norm())
    assert multi_tensor_applier(multi_tensor_l2norm, overflow, [[]], False)[0].item() == 0


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_scale_of_lists_reports_overflow(bad):
    overflow = torch.zeros(1, dtype=torch.int32)
    sources = [torch.tensor([1.0, 2.0]), torch.tensor([3e38, bad or 3e38]), torch.empty(0)]
    results = [torch.empty_like(t) for t in sources]
    multi_tensor_applier(multi_tensor_scale, overflow, [sources, results], 0.5)
    assert overflow.item() == (bad is not None)
    assert torch.equal(results[0], torch.tensor([0.5, 1.0]))
    multi_tensor_applier(multi_tensor_scale, overflow, [results, results], 2.0)
    assert torch.equal(results[0], sources[0])
