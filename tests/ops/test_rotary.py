"""Rotary embedding against products of complex numbers, and against its matrix."""

from __future__ import annotations

import pytest
import torch

from mindspeed.instruments.saved import saved_for_backward
from mindspeed.ops import OperatorError
from mindspeed.ops.npu_rotary_position_embedding import npu_rotary_position_embedding, rotate
from mindspeed.testing.compare import assert_close_with_grads
from tests.ops.traffic import model_bytes, traffic

EXACT = {"rtol": 1e-12, "atol": 1e-12}
LAYOUTS = {"bnsd": (0, 1, 2, 3), "bsnd": (0, 2, 1, 3), "sbnd": (2, 0, 1, 3)}


def formula(x, cos, sin, mode=0):
    if mode == 0:
        first, second = x.chunk(2, -1)
        rotated = torch.cat([-second, first], -1)
    else:
        rotated = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + rotated * sin


def leaf(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spread", [(1, 1), (2, 1), (2, 3)], ids=["11SD", "B1SD", "BNSD"])
def test_equals_the_formula_with_any_cosines_and_sines(mode, layout, spread):
    order = LAYOUTS[layout]
    x, cos, sin = leaf(2, 3, 5, 8), leaf(*spread, 5, 8, seed=1), leaf(*spread, 5, 8, seed=2)
    assert_close_with_grads(
        lambda *args: npu_rotary_position_embedding(*(a.permute(order) for a in args), mode),
        lambda *args: formula(*(a.permute(order) for a in args), mode),
        (x, cos, sin),
        **EXACT,
    )


@pytest.mark.parametrize("mode", [0, 1])
def test_numerical_gradients(mode):
    inputs = leaf(2, 1, 3, 4), leaf(1, 1, 3, 4, seed=1), leaf(1, 1, 3, 4, seed=2)
    assert torch.autograd.gradcheck(
        lambda *args: npu_rotary_position_embedding(*args, mode), inputs
    )


def angles(positions, size=8):
    freqs = positions[:, None].double() * 100.0 ** (-torch.arange(size // 2) / (size // 2))
    return torch.cat([freqs, freqs], -1)[None, None]


def test_dot_products_of_rotated_vectors_depend_on_their_distance_only():
    q, k = leaf(1, 1, 1, 8).detach(), leaf(1, 1, 1, 8, seed=1).detach()

    def score(i, j):
        a, b = (angles(torch.tensor([n])) for n in (i, j))
        return (rotate(q, a.cos(), a.sin()) * rotate(k, b.cos(), b.sin())).sum()

    torch.testing.assert_close(score(7, 4), score(103, 100))
    assert not torch.isclose(score(7, 4), score(8, 4))


def test_lengths_are_kept():
    x, a = leaf(2, 3, 6, 8), angles(torch.arange(6))
    torch.testing.assert_close(rotate(x, a.cos(), a.sin()).norm(dim=-1), x.norm(dim=-1))


def test_modes_are_related_by_an_order_of_the_channels():
    x, cos, sin = leaf(2, 3, 5, 8), leaf(1, 1, 5, 8, seed=1), leaf(1, 1, 5, 8, seed=2)
    neighbours = torch.arange(8).view(2, 4).t().flatten()  # 0 4 1 5 ...
    interleaved = rotate(*(a[..., neighbours] for a in (x, cos, sin)), 1)
    torch.testing.assert_close(interleaved, rotate(x, cos, sin, 0)[..., neighbours])


@pytest.mark.parametrize("mode", [0, 1])
def test_channels_after_the_rotated_ones_are_copied(mode):
    x, cos, sin = leaf(5, 2, 3, 10), leaf(5, 1, 1, 6, seed=1), leaf(5, 1, 1, 6, seed=2)
    assert_close_with_grads(
        lambda x, c, s: rotate(x, c, s, mode),
        lambda x, c, s: torch.cat([formula(x[..., :6], c, s, mode), x[..., 6:]], -1),
        (x, cos.detach(), sin.detach()),
        **EXACT,
    )


def test_gradients_of_the_table_need_both():
    x, cos, sin = leaf(1, 2, 3, 4), leaf(1, 1, 3, 4), leaf(1, 1, 3, 4).detach()
    npu_rotary_position_embedding(x, cos, sin).sum().backward()
    assert x.grad is not None and cos.grad is None


def test_bf16_is_rounded_once_and_the_table_is_not():
    x, a = leaf(4, 2, 64, 32, dtype=torch.bfloat16), angles(torch.arange(64), 32)
    cos, sin = a.cos().float(), a.sin().float()
    truth = formula(x.double(), cos.double(), sin.double()).detach()

    def error(y):
        return ((y - truth).abs() / truth.abs().clamp(min=2**-6)).max()

    half_a_unit = 2**-8
    assert error(rotate(x, cos, sin)) <= 1.05 * half_a_unit
    assert error(formula(x, cos.bfloat16(), sin.bfloat16())) > 2 * half_a_unit


def test_only_the_table_is_saved_for_backward():
    x, a = leaf(64, 1, 4, 16, dtype=torch.bfloat16), angles(torch.arange(64), 16)
    cos, sin = (f.float().permute(2, 0, 1, 3).contiguous() for f in (a.cos(), a.sin()))
    with saved_for_backward() as saved:
        rotate(x.clone(), cos, sin).sum().backward()
    assert saved.bytes == 2 * cos.numel() * 4


def test_bytes_moved():
    """4 per element in bf16 besides the table, forward and backward."""
    x = leaf(64, 1, 32, 128, dtype=torch.bfloat16).detach()
    cos = sin = torch.ones(64, 1, 1, 128)
    with traffic() as fused:
        y = torch.ops.mindspeed.rotary_position_embedding(x, cos, sin, 0)
        torch.ops.mindspeed.rotary_position_embedding_backward(y, cos, sin, 0)
    table = model_bytes((cos, sin), ())
    assert fused.bytes == 2 * (4 * x.numel() + table) and fused.kernels == 2
    with traffic() as eager:
        formula(x, cos.bfloat16(), sin.bfloat16())
    assert eager.bytes > 4 * 4 * x.numel()


def test_one_graph_forward_and_backward():
    x, a = leaf(2, 3, 6, 8, dtype=torch.float32), angles(torch.arange(6)).float()

    def loss(x):
        return rotate(x, a.cos(), a.sin()).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected, found = (torch.autograd.grad(f(x), x) for f in (loss, compiled))
    torch.testing.assert_close(found, expected)


X, T = torch.zeros(2, 3, 5, 8), torch.zeros(1, 1, 5, 8)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X, T, T, 2), "mode: expected one of 0, 1, got 2"),
        ((X[0], T, T), r"x: expected 4 dimensions, got shape \(3, 5, 8\)"),
        ((X[..., :7], T, T), "x: expected an even last dimension less than 896, got 7"),
        ((X.repeat(1, 1, 1, 112), T, T), "x: expected an even last dimension less than 896"),
        ((X, T[..., :4], T), "cos: expected a last dimension of 8"),
        ((X, T, T[:, :, :1]), r"sin: expected the shape of cos, \(1, 1, 5, 8\)"),
        ((X, T.expand(1, 2, 5, 8), T.expand(1, 2, 5, 8)), "cos: expected dimensions of 1 or"),
        ((X, T.half(), T.half()), "cos: expected dtype float32, got float16"),
        ((X.long(), T, T), "x: expected dtype float32, bfloat16, float16"),
    ],
)
def test_bad_input(args, message):
    with pytest.raises(
        OperatorError, match=f"^mindspeed.ops.npu_rotary_position_embedding: {message}"
    ):
        npu_rotary_position_embedding(*args)
