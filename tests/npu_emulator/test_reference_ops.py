"""Restated operators against torch: values against its functions, gradients against autograd.

The restatements are plain functions on CPU tensors, so they are tested here without torch_npu;
``test_dispatch.py`` calls them through the package.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.npu_emulator import rng
from tests.npu_emulator.reference_ops import experts, grouped, norms, pointwise, ring


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def autograd(function, inputs, grad):
    """Gradients of `function` by torch's autograd."""
    inputs = [value.clone().requires_grad_() for value in inputs]
    return torch.autograd.grad(function(*inputs), inputs, grad)


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_rms_norm():
    x, gamma, dy = randn(3, 4, 8), randn(8, seed=1), randn(3, 4, 8, seed=2)
    expected = lambda x, gamma: F.rms_norm(x, (8,), gamma, 1e-5)  # noqa: E731
    y, rstd = norms.npu_rms_norm(x, gamma, 1e-5)
    assert_close(y, expected(x, gamma))
    assert rstd.shape == (3, 4, 1)
    assert_close(
        norms.npu_rms_norm_backward(dy, x, gamma, rstd), autograd(expected, (x, gamma), dy)
    )


def test_norms_of_a_sum():
    a, b, gamma, beta = randn(5, 8), randn(5, 8, seed=1), randn(8, seed=2), randn(8, seed=3)
    y, rstd, total = norms.npu_add_rms_norm(a, b, gamma)
    assert_close(y, F.rms_norm(a + b, (8,), gamma, 1e-6))
    assert_close(rstd, (a + b).square().mean(-1, keepdim=True).add(1e-6).rsqrt())
    assert_close(total, a + b)
    y, mean, rstd, total = norms.npu_add_layer_norm(a, b, gamma, beta, 1e-5, True)
    expected = torch.native_layer_norm(a + b, (8,), gamma, beta, 1e-5)
    assert_close((y, mean, rstd, total), (*expected, a + b))
    assert norms.npu_add_layer_norm(a, b, gamma, beta)[3].isnan().all()


@pytest.mark.parametrize("dim", [-1, 0])
def test_swiglu(dim):
    x, dy = randn(6, 8), randn(6, 4, seed=1) if dim else randn(3, 8, seed=1)
    expected = lambda x: F.silu(x.chunk(2, dim)[0]) * x.chunk(2, dim)[1]  # noqa: E731
    assert_close(pointwise.npu_swiglu(x, dim), expected(x))
    assert_close(pointwise.npu_swiglu_backward(dy, x, dim), autograd(expected, (x,), dy)[0])


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_turns_pairs_of_numbers(mode):
    x, angle = randn(5, 2, 3, 8), randn(5, 1, 1, 4, seed=1)
    spread = lambda t: torch.cat((t, t), -1) if mode == "half" else t.repeat_interleave(2, -1)  # noqa: E731
    y = pointwise.npu_rotary_mul(x, spread(angle.cos()), spread(angle.sin()), mode)
    pairs = torch.stack(x.chunk(2, -1), -1) if mode == "half" else x.unflatten(-1, (-1, 2))
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angle))
    assert_close(y, turned.transpose(-1, -2).flatten(-2) if mode == "half" else turned.flatten(-2))


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_gradients_hold_for_any_factors(mode):
    x, r1, r2 = randn(5, 2, 3, 8), randn(5, 1, 1, 8, seed=1), randn(5, 1, 1, 8, seed=2)
    dy = randn(5, 2, 3, 8, seed=3)
    expected = autograd(lambda *t: pointwise.npu_rotary_mul(*t, mode), (x, r1, r2), dy)
    assert_close(pointwise.npu_rotary_mul_backward(dy, x, r1, r2, mode), expected)


@pytest.mark.parametrize("triangle", [False, True])
def test_scaled_masked_softmax(triangle):
    x, dy = randn(2, 3, 32, 64), randn(2, 3, 32, 64, seed=1)
    mask = randn(2, 1, 32, 64, seed=2) > 0
    used = torch.ones(32, 64, dtype=torch.bool).triu(1) if triangle else mask
    expected = lambda x: (0.5 * x).masked_fill(used, -1e4).softmax(-1)  # noqa: E731
    y = pointwise.npu_scaled_masked_softmax(x, mask, 0.5, triangle)
    assert_close(y, expected(x))
    dx = pointwise.npu_scaled_masked_softmax_backward(dy, y, mask, 0.5, triangle)
    assert_close(dx, autograd(expected, (x,), dy)[0])


def test_documented_limits_are_errors():
    with pytest.raises(ValueError, match="32 to 4096, by 32"):
        pointwise.npu_scaled_masked_softmax(randn(1, 1, 16, 32), torch.zeros(1).bool())
    with pytest.raises(ValueError, match="half or interleave"):
        pointwise.npu_rotary_mul(*[randn(1, 1, 1, 8)] * 3, "quarter")


def test_dropout_keeps_its_rate_and_mask(monkeypatch):
    monkeypatch.setattr(rng, "reserve", lambda: (3, 4))
    x = torch.ones(100, 77)
    y, mask = pointwise._npu_dropout(x, 0.25)
    assert mask.dtype == torch.uint8
    assert mask.shape == ((7700 + 127) // 128 * 128 // 8,)
    assert y.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert 0.73 < y.ne(0).float().mean() < 0.77
    assert pointwise.npu_dropout_backward(x, mask, 0.25).equal(y)


SIZES, ENDS = torch.tensor([3, 0, 4]), torch.tensor([3, 3, 7])
SLICES = [slice(0, 3), slice(3, 3), slice(3, 7)]


@pytest.mark.parametrize(("groups", "kind"), [(SIZES, 1), (ENDS, 0), ([3, 3, 7], 0)])
def test_grouped_matmul_over_rows(groups, kind):
    x, w = randn(7, 4), randn(3, 4, 5, seed=1)
    expected = torch.cat([x[rows] @ w[g] for g, rows in enumerate(SLICES)])
    how = {"group_list": groups, "group_list_type": kind, "group_type": 0}
    (y,) = grouped.npu_grouped_matmul([x], [w], split_item=3, **how)
    assert_close(y, expected)
    parts = grouped.npu_grouped_matmul([x], list(w), split_item=0, **how)
    assert_close(torch.cat(parts), expected)
    assert [len(part) for part in parts] == [3, 0, 4]


def test_grouped_matmul_over_columns():
    x, dy = randn(7, 4), randn(7, 5, seed=1)
    (dw,) = grouped.npu_grouped_matmul(
        [x.t()], [dy], group_list=SIZES, group_list_type=1, group_type=2, split_item=3
    )
    assert_close(dw, torch.stack([x[rows].t() @ dy[rows] for rows in SLICES]))


def test_grouped_matmul_of_lists():
    xs, ws = [randn(2, 4), randn(3, 4, seed=1)], [randn(4, 5, seed=2), randn(4, 5, seed=3)]
    bias = [randn(5, seed=4), randn(5, seed=5)]
    expected = [x @ w + b for x, w, b in zip(xs, ws, bias, strict=True)]
    assert_close(grouped.npu_grouped_matmul(xs, ws, bias=bias, group_type=-1), expected)
    (joined,) = grouped.npu_grouped_matmul(xs, ws, bias=bias, group_type=-1, split_item=2)
    assert_close(joined, torch.cat(expected))


def test_rows_outside_every_group_are_nan():
    (y,) = grouped.npu_grouped_matmul(
        [randn(9, 4)], [randn(3, 4, 5)], group_list=ENDS, group_type=0, split_item=3
    )
    assert y[7:].isnan().all()
    assert not y[:7].isnan().any()


def test_grouped_matmul_of_integers():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (7, 64), generator=generator, dtype=torch.int8)
    w = torch.randint(-128, 128, (3, 64, 5), generator=generator, dtype=torch.int8)
    scale, per_token = randn(3, 5).abs(), randn(7, seed=1).abs()
    exact = torch.cat([x[rows].double() @ w[g].double() for g, rows in enumerate(SLICES)])
    by_row = torch.cat([scale[g].expand(len(x[rows]), 5) for g, rows in enumerate(SLICES)])
    how = {"group_list": ENDS, "group_type": 0, "split_item": 3}
    (y,) = grouped.npu_grouped_matmul(
        [x], [w], scale=[scale], per_token_scale=[per_token], output_dtype=6, **how
    )
    assert_close(y, (exact * by_row * per_token[:, None]).float())
    packed = grouped.npu_trans_quant_param(scale.flatten()).view(3, 5)
    (y,) = grouped.npu_grouped_matmul([x], [w], scale=[packed], output_dtype=6, **how)
    assert_close(y, (exact * by_row).float())


def test_grouped_matmul_of_integer_weights():
    x = randn(7, 4)
    w = torch.randint(-128, 128, (3, 4, 5), generator=torch.Generator().manual_seed(1)).char()
    scale, offset = randn(3, 5, seed=2), randn(3, 5, seed=3)
    (y,) = grouped.npu_grouped_matmul(
        [x], [w], antiquant_scale=[scale], antiquant_offset=[offset], group_list=ENDS,
        group_type=0, split_item=3, act_type=5,
    )  # fmt: skip
    real = (w.float() + offset[:, None]) * scale[:, None]
    assert_close(y, F.silu(torch.cat([x[rows] @ real[g] for g, rows in enumerate(SLICES)])))


def test_grouped_accumulation():
    x, dy, total = (
        randn(7, 4, dtype=torch.bfloat16),
        randn(7, 5, dtype=torch.bfloat16),
        randn(12, 5),
    )
    before = total.clone()
    result = grouped.npu_grouped_matmul_add_(total, x, dy, ENDS)
    assert result is total
    product = torch.cat([x[rows].float().t() @ dy[rows].float() for rows in SLICES])
    assert_close(total, before + product)
    total, single = torch.zeros(4, 5), torch.zeros(4, 5)
    grouped._npu_matmul_add_fp32(x, dy, single)
    assert_close(single, total + x.float().t() @ dy.float())


@pytest.mark.parametrize("activation", ["relu", "silu", "swiglu"])
def test_feed_forward(activation):
    x, w2 = randn(7, 4), randn(6, 4, seed=2)
    gated = activation == "swiglu"
    w1, b1, b2 = randn(4, 12 if gated else 6, seed=1), randn(12 if gated else 6), randn(4)
    hidden = x @ w1 + b1
    if gated:
        hidden = F.silu(hidden.chunk(2, -1)[0]) * hidden.chunk(2, -1)[1]
    else:
        hidden = getattr(F, activation)(hidden)
    assert_close(grouped.npu_ffn(x, w1, w2, activation, bias1=b1, bias2=b2), hidden @ w2 + b2)


def test_feed_forward_by_expert():
    x, w1, w2 = randn(7, 4), randn(3, 4, 6, seed=1), randn(3, 6, 4, seed=2)
    expected = torch.cat([torch.relu(x[rows] @ w1[g]) @ w2[g] for g, rows in enumerate(SLICES)])
    assert_close(grouped.npu_ffn(x, w1, w2, "relu", expert_tokens=SIZES.tolist()), expected)
    assert_close(grouped.npu_ffn(x, w1, w2, "relu", expert_tokens_index=ENDS.tolist()), expected)


INDICES = torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]])  # of torch_npu's documentation


def test_permute_as_documented():
    tokens = torch.tensor([[1.0], [2], [3], [0]])
    permuted, rows = experts.npu_moe_token_permute(tokens, INDICES)
    assert rows.tolist() == [0, 5, 6, 4, 7, 3, 1, 2]
    assert permuted.flatten().tolist() == [1, 0, 0, 3, 2, 1, 2, 3]
    for slot, row in enumerate(rows.tolist()):
        assert permuted[row].equal(tokens[slot // 2])
    assert experts.npu_moe_token_permute(tokens, INDICES, 5)[0].equal(permuted[:5])
    assert experts.npu_moe_token_permute(tokens, INDICES, -2)[0].equal(permuted[:-2])


@pytest.mark.parametrize("count", [8, 5])
def test_permute_and_unpermute_gradients(count):
    tokens, probs = randn(4, 3), randn(4, 2, seed=1)
    permute = lambda t: experts.npu_moe_token_permute(t, INDICES, count)[0]  # noqa: E731
    permuted, rows = experts.npu_moe_token_permute(tokens, INDICES, count)
    grad = randn(count, 3, seed=2)
    expected = autograd(permute, (tokens,), grad)[0]
    assert_close(experts.npu_moe_token_permute_grad_v2(grad, rows, 4, torch.float32, 2), expected)
    assert_close(experts.npu_moe_token_permute_grad(tokens, grad, INDICES, rows), expected)

    unpermute = lambda t, p: experts.npu_moe_token_unpermute(t, rows, p)  # noqa: E731
    present = (rows < count).view(4, 2)
    assert_close(unpermute(permuted, probs), tokens * (probs * present).sum(1, keepdim=True))
    dy = randn(4, 3, seed=3)
    expected = autograd(unpermute, (permuted, probs), dy)
    assert_close(experts.npu_moe_token_unpermute_grad(permuted, dy, rows, probs), expected)
    v2 = experts.npu_moe_token_unpermute_grad_v2(
        dy, rows, count, torch.float32, probs, permuted_tokens=permuted
    )
    assert_close(v2, expected)


def test_permute_by_routing_map():
    tokens, probs = randn(4, 3), randn(4, 5, seed=1)
    routing_map = torch.zeros(4, 5, dtype=torch.bool).scatter_(
        1, torch.tensor([[0, 4], [4, 3], [4, 2], [1, 0]]), True
    )
    permuted, by_row, rows = experts.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=probs, num_out_tokens=8
    )
    # Ordered by expert, then by token, like masked_select on the transposed map.
    token = torch.arange(4).expand(5, 4).masked_select(routing_map.t())
    assert permuted.equal(tokens[token])
    assert by_row.equal(probs.t().masked_select(routing_map.t()))

    grads = randn(8, 3, seed=2), randn(8, seed=3)

    def forward(t, p):
        return experts.npu_moe_token_permute_with_routing_map(
            t, routing_map, probs=p, num_out_tokens=8
        )[:2]

    inputs = [value.clone().requires_grad_() for value in (tokens, probs)]
    expected = torch.autograd.grad(forward(*inputs), inputs, grads)
    got = experts.npu_moe_token_permute_with_routing_map_grad(
        *grads, rows, routing_map, 5, 4, False
    )
    assert_close(got, expected)

    back = lambda t, p: experts._npu_moe_token_unpermute_with_routing_map(  # noqa: E731
        t, rows, [4, 3], probs=p, routing_map=routing_map
    )
    out, index, of_token, by_row_again = back(permuted, probs)
    assert_close(out, tokens * (probs * routing_map).sum(1, keepdim=True))
    assert by_row_again.equal(by_row)
    dy = randn(4, 3, seed=4)
    got = experts.npu_moe_token_unpermute_with_routing_map_grad(
        dy, index, of_token, routing_map, permuted, probs, False, [4, 3]
    )
    assert_close(got, autograd(lambda t, p: back(t, p)[0], (permuted, probs), dy))
    with pytest.raises(ValueError, match="each row of routing_map has 2 ones"):
        routing_map[0, 1] = True
        forward(tokens, probs)


@pytest.mark.parametrize("layout", ["SBH", "TND", "TND statistics in TND"])
def test_ring_update_merges_two_softmaxes(layout):
    """Attention over 6 keys from attention over the first 2 and the last 4."""
    heads, lengths = 2, [3, 1] if layout != "SBH" else [4]
    logits, v = randn(2, heads, 4, 6), randn(6, 5, seed=1)  # [b, n, s, keys]
    if layout != "SBH":
        logits = logits[:1]

    def statistics(part):
        """Softmax over `part` of the keys: output and statistics in the layout."""
        maximum = logits[..., part].amax(-1)
        p = torch.exp(logits[..., part] - maximum[..., None])
        total = p.sum(-1)
        out = p @ v[part] / total[..., None]
        out = out.permute(2, 0, 1, 3).flatten(2) if layout == "SBH" else out[0].transpose(0, 1)

        def lay(t):
            if layout == "SBH":
                return t[..., None].repeat(1, 1, 1, 8)
            if "statistics" in layout:
                t = t[0].t().flatten()
            else:
                t = torch.cat([piece.flatten() for piece in t[0].split(lengths, -1)])
            return t.view(4, heads, 1).repeat(1, 1, 8)

        return out, lay(maximum), lay(total)

    first, second, whole = (statistics(slice(*ends)) for ends in ((0, 2), (2, 6), (0, 6)))
    merged = ring.npu_ring_attention_update(
        *first, *second,
        actual_seq_qlen=None if layout == "SBH" else torch.tensor([0, 3, 4]),
        input_layout=layout[:3], input_softmax_layout="TND" if "statistics" in layout else "",
    )  # fmt: skip
    assert_close(merged, whole)
