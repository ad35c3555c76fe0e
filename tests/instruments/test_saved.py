"""Bytes saved for backward equal hand counts, and vanish when the graph is released."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed.instruments import saved_for_backward
from tests.instruments import saved_ranks

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


def test_tensors_saved_by_a_custom_function_are_counted():
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


def test_sequential_micro_batches_do_not_accumulate():
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
    assert all("instruments/test_saved.py" in site for site in sites)
    assert saved.table().splitlines()[-1].split() == ["total", f"{9 * X:,}"]
    del output


def test_an_exception_leaves_no_hook_behind():
    linear = nn.Linear(H, H)
    with pytest.raises(RuntimeError), saved_for_backward(linear) as saved:
        linear(torch.randn(B, H + 1))
    before = saved.bytes
    linear(torch.randn(B, H, requires_grad=True)).sum().backward()
    assert saved.bytes == before


def test_a_resized_storage_is_uncounted_when_freed_and_counted_when_restored():
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


def test_an_unsaved_storage_may_be_resized():
    x = torch.randn(B, H)
    with saved_for_backward() as saved:
        x.untyped_storage().resize_(0)
    assert saved.bytes == 0


def new_block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(H, H), nn.GELU(), nn.Linear(H, H), nn.GELU())


def test_activation_checkpointing_frees_recomputed_tensors():
    block = new_block()
    x = torch.randn(B, H, requires_grad=True)
    with saved_for_backward(block) as saved:
        output = checkpoint(block, x, use_reentrant=False)
    assert (saved.bytes, saved.host_bytes, saved.dropped_bytes) == (X, 0, 3 * X)
    output.sum().backward()


def test_recomputed_tensors_count_until_the_backward_has_used_them():
    peaks = {}
    for reentrant in (True, False):
        blocks = [new_block() for _ in range(3)]
        x = torch.randn(B, H, requires_grad=True)
        with saved_for_backward(*blocks) as saved:
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            x.sum().backward()
        assert saved.live_bytes == 0
        peaks[reentrant] = saved.bytes
    assert peaks == {True: 6 * X, False: 6 * X}, "three inputs, and three more of the last block"


def test_save_on_cpu_moves_nothing_where_the_tensor_is_on_the_cpu():
    x = torch.randn(B, H, requires_grad=True)
    with saved_for_backward() as saved, torch.autograd.graph.save_on_cpu():
        y = x.sin().cos()
    assert (saved.bytes, saved.host_bytes, saved.dropped_bytes) == (2 * X, 0, 0)
    y.sum().backward()
    assert saved.live_bytes == 0


@pytest.mark.parametrize("pinned", [False, True])
def test_save_on_cpu_keeps_bytes_of_a_device_on_the_host(npu, pinned):
    found = npu(saved_ranks.save_on_cpu, "npu", pinned)
    assert found == {"peak": (X, 2 * X, 0), "left": (0, 0)}


def on_host() -> torch.autograd.graph.saved_tensors_hooks:
    """Offloading as it looks on a device of its own: a copy in other memory."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda x: (x.device, x.clone()), lambda packed: packed[1].to(packed[0])
    )


def test_copies_of_inner_hooks_count_on_the_host():
    x = torch.randn(B, H, requires_grad=True)
    with saved_for_backward() as saved:
        with on_host():
            y = x.sin()
            z = y.cos()
        w = z.exp()
        assert saved.live_bytes == X, "the result of exp"
        assert saved.live_host_bytes == 2 * X
    assert (saved.bytes, saved.host_bytes, saved.dropped_bytes) == (X, 2 * X, 0)
    w.sum().backward()
    assert saved.live_bytes == saved.live_host_bytes == 0
    torch.testing.assert_close(x.grad, (w * -x.sin().sin() * x.cos()).detach())


def test_a_tensor_saved_inside_and_outside_is_on_the_device_and_on_the_host():
    x = torch.randn(B, H, requires_grad=True)
    with saved_for_backward() as saved:
        outer = x.sin()
        with on_host():
            inner = x.cos()
    assert (saved.bytes, saved.host_bytes, saved.dropped_bytes) == (X, X, 0)
    del outer
    assert (saved.live_bytes, saved.live_host_bytes) == (0, X)
    del inner
    assert saved.live_host_bytes == 0


def test_only_the_innermost_hooks_decide():
    """Half of a block is offloaded, inside a checkpoint that drops the other half."""
    halves = [new_block(), new_block()]

    def run(x):
        x = halves[0](x)
        with on_host():
            return halves[1](x)

    x = torch.randn(B, H, requires_grad=True)
    with saved_for_backward(*halves) as saved:
        y = checkpoint(run, x, use_reentrant=False)
        assert saved.live_bytes == X
        assert saved.live_host_bytes == 4 * X
        assert saved.dropped_bytes == 3 * X
        del y
        assert saved.live_bytes == saved.live_host_bytes == 0


def test_a_storage_packed_to_a_key_counts_until_freed_and_then_as_its_copy():
    """Hooks that return a number, copy at the end of a layer, and free or forget the tensor."""
    table: list[torch.Tensor] = []

    def pack(x):
        table.append(x)
        return len(table) - 1

    def offload(free: bool) -> None:
        for number, x in enumerate(table):
            host = torch.empty(x.shape)
            host.copy_(x.contiguous())
            table[number] = host
            if free and not x.is_leaf:
                x.untyped_storage().resize_(0)

    for free in (False, True):
        table.clear()
        x = torch.randn(H, B, requires_grad=True)
        with saved_for_backward() as saved:
            with torch.autograd.graph.saved_tensors_hooks(pack, table.__getitem__):
                y = x.sin().t().cos()
                assert (saved.live_bytes, saved.live_host_bytes) == (2 * X, 0)
            with torch.no_grad():
                offload(free)
            assert (saved.live_bytes, saved.live_host_bytes) == (X, 2 * X), "x itself stays"
            assert saved.dropped_bytes == 0
            y.sum().backward()
            assert saved.live_host_bytes == 0
        torch.testing.assert_close(x.grad, (-x.sin().sin() * x.cos()).detach())


def test_hooks_pushed_before_the_block_work_as_before():
    x = torch.randn(B, H, requires_grad=True)
    with on_host():
        with saved_for_backward() as saved:
            y = x.sin()
        z = y.cos()  # saved by the hooks around
    assert saved.bytes == X
    z.sum().backward()
    torch.testing.assert_close(x.grad, (-x.sin().sin() * x.cos()).detach())


def test_megatrons_checkpoint_without_output_drops_its_output(ranks):
    (found,) = ranks(1, saved_ranks.without_output, setup="tests.support.warm")
    statistics = 2 * 4 * B  # of the norm
    assert found == {
        "plain": (5 * X + statistics, 0),
        "checkpointed": (4 * X, X),
        "equal": True,
    }


def test_megatrons_fine_grained_offload_counts_on_the_host(ranks):
    """Megatron's own summary says how many bytes it copies; who saves them elsewhere is by hand."""
    (found,) = ranks(1, saved_ranks.fine_grained_offload, setup="tests.support.warm")
    layers, sbh, heads = 2, 4 * 16 * 2 * 32, 4
    lse = 4 * heads * 16 * 2
    offloaded = layers * (3 * sbh + lse)  # query, key and value of half as many heads, output
    also_saved_by_the_projection = layers * sbh  # the output
    assert found["host"] == found["megatron"] == offloaded
    assert found["device"] == found["plain"] - offloaded + also_saved_by_the_projection
    assert found["dropped"] == 0
    assert found["left"] == (0, 0)
    assert found["equal"]
