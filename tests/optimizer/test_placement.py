"""States in host memory: windows, bytes that move, and updates equal to those on the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.optimizer.placement import ALIGNMENT, HostMapped, HostSwap, windows
from mindspeed.te import optimizer_policy
from mindspeed.te.optimizers import FusedAdam

SHAPES = ((300, 7), (65,), (1,), (0,), (64, 64))
COUNT = sum(torch.Size(shape).numel() for shape in SHAPES)


def parameters(dtype):
    generator = torch.Generator().manual_seed(4)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def train(optimizer, params, decoupled, steps=5):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for p in params:
            grad = torch.randn(p.shape, generator=generator)
            if decoupled:
                p.decoupled_grad = grad
            else:
                p.grad = grad.to(p.dtype)
        optimizer.step()


def build(params, dtype):
    groups = [
        {"params": params[:2], "weight_decay": 0.1},
        {"params": params[2:], "weight_decay": 0.0},
    ]
    half = dtype != torch.float32
    return FusedAdam(groups, lr=1e-2, master_weights=half, use_decoupled_grad=half)


@given(st.lists(st.integers(0, 500), max_size=6), st.integers(ALIGNMENT, 400))
def test_windows_cover_everything_once_in_order(sizes, limit):
    covered = [[] for _ in sizes]
    found = list(windows(sizes, limit))
    for window in found:
        assert 0 < sum(span.stop - span.start for span in window) <= limit
        for span in window:
            covered[span.index] += range(span.start, span.stop)
            assert span.start % ALIGNMENT == 0
    assert covered == [list(range(size)) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("times", [1, 3, 16, 10**6])
def test_swapped_states_train_bit_for_bit(monkeypatch, dtype, times):
    plain = parameters(dtype)
    reference = build(plain, dtype)
    train(reference, plain, dtype != torch.float32)

    space = HostSwap(times)
    monkeypatch.setattr(optimizer_policy, "state_placement", lambda name: space)
    swapped = parameters(dtype)
    optimizer = build(swapped, dtype)
    train(optimizer, swapped, dtype != torch.float32)
    for p, q in zip(plain, swapped, strict=True):
        assert torch.equal(p, q)
        assert set(reference.state[p]) == set(optimizer.state[q])
        for name in reference.state[p]:
            states = (o.get_unscaled_state(x, name) for o, x in ((reference, p), (optimizer, q)))
            assert torch.equal(*states)
    width = 4 * (2 if dtype == torch.float32 else 3)
    assert space.figures.to_device == space.figures.to_host == 5 * width * COUNT
    assert space.figures.peak <= 2 * width * max(ALIGNMENT, COUNT // times)


def test_bytes_of_the_copies_are_those_that_torch_makes(monkeypatch):
    """An independent count: every copy between two tensors during a step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    copied = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.copy_.default and True in args[2:]:
                copied.append(args[0].nbytes)  # not blocking
            return function(*args, **(kwargs or {}))

    space = HostSwap(4)
    monkeypatch.setattr(optimizer_policy, "state_placement", lambda name: space)
    params = parameters(torch.float32)
    optimizer = build(params, torch.float32)
    with Copies():
        train(optimizer, params, False, steps=1)
    assert sum(copied) == 2 * 8 * COUNT == space.figures.to_device + space.figures.to_host


def test_mapped_states_train_bit_for_bit_up_to_their_limit(monkeypatch):
    plain = parameters(torch.bfloat16)
    reference = build(plain, torch.bfloat16)
    train(reference, plain, True)

    space = HostMapped(4 * 300 * 7)  # one state of the first parameter
    monkeypatch.setattr(
        optimizer_policy, "state_placement", lambda name: None if "master" in name else space
    )
    mapped = parameters(torch.bfloat16)
    optimizer = build(mapped, torch.bfloat16)
    train(optimizer, mapped, True)
    assert space.mapped == space.limit
    for p, q in zip(plain, mapped, strict=True):
        assert torch.equal(p, q)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    for p, q in zip(plain, mapped, strict=True):
        for name in reference.state[p]:
            states = (o.get_unscaled_state(x, name) for o, x in ((reference, p), (optimizer, q)))
            assert torch.equal(*states)
