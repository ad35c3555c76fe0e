"""Bytes saved for backward equal hand counts, and vanish when the graph is released."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed.testing import saved_for_backward

B, H = 8, 16
X = 4 * B * H  # bytes of one fp32 activation [B, H]


def test_a_linear_saves_its_input_once_and_not_its_weight():
    linear = nn.Linear(H, H)
    x = torch.randn(B, H, requires_grad=True)
    with saved_for_backward(linear) as saved:
        output = linear(x)
    assert saved.bytes == X
    del output


def test_parameters_are_counted_on_demand():
    linear = nn.Linear(H, H)
    x = torch.randn(B, H, requires_grad=True)
    with saved_for_backward(linear, include_parameters=True) as saved:
        output = linear(x)
    assert saved.bytes == X + 4 * H * H
    del output


def test_a_tensor_saved_by_two_operators_counts_once():
    x = torch.randn(B, H, requires_grad=True)
    with saved_for_backward() as saved:
        outputs = x.sin(), x.cos(), x[2:].exp()
    assert saved.bytes == X + 4 * (B - 2) * H, "x once for sin and cos, plus the result of exp"
    del outputs


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_saves_only_its_input(reentrant):
    block = nn.Sequential(nn.Linear(H, H), nn.GELU(), nn.Linear(H, H), nn.GELU())
    x = torch.randn(B, H, requires_grad=True)
    with saved_for_backward(block) as plain:
        block(x).sum().backward()
    with saved_for_backward(block) as saved:
        output = checkpoint(block, x, use_reentrant=reentrant)
    assert plain.bytes == 4 * X, "the inputs of two linears and of two GELUs"
    assert saved.bytes == X
    output.sum().backward()


def test_attention_saves_q_k_v_its_output_and_the_log_sum_exp():
    b, n, s, d = 2, 4, 32, 8
    q, k, v = (torch.randn(b, n, s, d, requires_grad=True) for _ in range(3))
    with saved_for_backward() as saved:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert saved.bytes == 4 * (4 * b * n * s * d + b * n * s)
    del output


def test_what_a_custom_function_saves_is_seen():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.double())
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * x.float() * gradient

    x = torch.randn(B, H, requires_grad=True)
    with saved_for_backward() as saved:
        Square.apply(x).sum().backward()
    assert saved.bytes == 2 * X
    assert torch.equal(x.grad, 2 * x)


def test_the_backward_releases_everything_and_the_peak_remains():
    x = torch.randn(B, H, requires_grad=True)
    with saved_for_backward() as saved:
        loss = x.sin().cos().sum()
        assert saved.live_bytes == saved.bytes == 2 * X
        loss.backward()
    assert saved.live_bytes == 0
    assert saved.bytes == 2 * X


def test_micro_batches_one_after_the_other_do_not_add_up():
    with saved_for_backward() as saved:
        for _ in range(3):
            torch.randn(B, H, requires_grad=True).sin().sum().backward()
    assert saved.bytes == X


def test_the_table_names_modules_and_source_lines():
    model = nn.ModuleDict({"up": nn.Linear(H, 4 * H), "down": nn.Linear(4 * H, H)})
    x = torch.randn(B, H, requires_grad=True)
    with saved_for_backward(model) as saved:
        hidden = F.gelu(model["up"](x))
        output = model["down"](hidden)
    assert saved.by_module() == {"up": X, "(no module)": 4 * X, "down": 4 * X}
    sites = saved.by_site()
    assert sum(sites.values()) == saved.bytes == 9 * X
    assert all("testing/test_saved.py" in site for site in sites)
    assert saved.table().splitlines()[-1].split() == ["total", f"{9 * X:,}"]
    del output


def test_an_exception_leaves_no_hook_behind():
    linear = nn.Linear(H, H)
    with pytest.raises(RuntimeError), saved_for_backward(linear) as saved:
        linear(torch.randn(B, H + 1))
    before = saved.bytes
    linear(torch.randn(B, H, requires_grad=True)).sum().backward()
    assert saved.bytes == before


def test_a_freed_storage_counts_no_longer_and_again_when_it_is_restored():
    x = torch.randn(B, H, requires_grad=True)
    before = torch.UntypedStorage.resize_
    with saved_for_backward() as saved:
        y = x.sin()  # saves x
        z = y.cos()  # saves y
        assert saved.live_bytes == 2 * X
        y.untyped_storage().resize_(0)
        assert saved.live_bytes == X
        w = z.exp()  # saves its result
        assert saved.bytes == 2 * X, "x and y, then x and the result of exp: never three"
        y.untyped_storage().resize_(X)
        y.data.copy_(x.sin())
        assert saved.live_bytes == saved.bytes == 3 * X
        w.sum().backward()
        assert saved.live_bytes == 0
    assert torch.UntypedStorage.resize_ is before
    torch.testing.assert_close(x.grad, (w * -x.sin().sin() * x.cos()).detach())


def test_a_storage_that_nobody_saved_may_be_resized():
    x = torch.randn(B, H)
    with saved_for_backward() as saved:
        x.untyped_storage().resize_(0)
    assert saved.bytes == 0
