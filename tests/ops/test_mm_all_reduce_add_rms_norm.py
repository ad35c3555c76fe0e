"""npu_mm_all_reduce_add_rms_norm and its in-place twin against one process, in every form."""

from __future__ import annotations

import pytest
import torch

from mindspeed.ops.npu_mm_all_reduce_add_rms_norm import npu_mm_all_reduce_add_rms_norm
from tests.ops import group_ranks

EPS = 1e-5
M, K, N = 6, 12, 10  # k is divided over up to 4 ranks


def draw(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole_numbers(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=generator, dtype=torch.int8)


def truth(product, residual, gamma):
    y = product.double() + residual.double()
    return y, y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * gamma.double()


def slices(world, x1, x2, **others):
    """What each rank is given: its columns of x1 and rows of x2."""
    parts = zip(x1.chunk(world, -1), x2.chunk(world, 0), strict=True)
    shared = {"epsilon": EPS, **others}
    return [
        {"x1": a.contiguous(), "x2": b, **{k: _clone(v) for k, v in shared.items()}}
        for a, b in parts
    ]


def _clone(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("lead", [(M,), (2, 3)], ids=["2-D", "3-D"])
def test_equals_one_process(ranks, world, in_place, lead):
    x1, x2 = draw(*lead, K, seed=0), draw(N, K, seed=1).t()
    residual, gamma, bias = draw(*lead, N, seed=2), draw(N, seed=3), draw(N, seed=4)
    arguments = slices(world, x1, x2, residual=residual, gamma=gamma, bias=bias / world)
    expected = truth(x1 @ x2 + bias, residual, gamma)
    job = group_ranks.mm_all_reduce_add_rms_norm
    for y, norm, same, kept, calls in ranks(world, job, in_place, arguments, not in_place):
        torch.testing.assert_close((y, norm), expected)
        assert same == in_place and kept != in_place
        assert calls == [("all_reduce", M * N * 8)]


def test_the_bias_of_every_rank_is_added(ranks):
    x1, x2, bias = draw(M, K, seed=0), draw(K, N, seed=1), draw(N, seed=4)
    residual, gamma = draw(M, N, seed=2), draw(N, seed=3)
    arguments = slices(2, x1, x2, residual=residual, gamma=gamma, bias=bias)
    expected = truth(x1 @ x2 + 2 * bias, residual, gamma)
    for y, norm, *_ in ranks(2, group_ranks.mm_all_reduce_add_rms_norm, False, arguments):
        torch.testing.assert_close((y, norm), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_to_its_dtype_before_sending(ranks, dtype):
    x1, x2 = draw(M, K, seed=0, dtype=dtype), draw(K, N, seed=1, dtype=dtype)
    residual, gamma = draw(M, N, seed=2, dtype=dtype), draw(N, seed=3, dtype=dtype)
    arguments = slices(2, x1, x2, residual=residual, gamma=gamma)
    y64, norm64 = truth(x1.double() @ x2.double(), residual, gamma)
    eps = torch.finfo(dtype).eps
    for y, norm, *_, calls in ranks(2, group_ranks.mm_all_reduce_add_rms_norm, False, arguments):
        assert y.dtype == norm.dtype == dtype
        assert (y - y64).abs().max() <= 2 * eps * y64.abs().max()
        assert (norm - norm64).abs().max() <= 4 * eps * norm64.abs().max()
        assert calls == [("all_reduce", M * N * dtype.itemsize)]


@pytest.mark.parametrize(
    ("scale_dtype", "dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.int64, torch.float16),
    ],
)
def test_int8_products_are_exact_before_the_scale(ranks, scale_dtype, dtype):
    k = 4096  # too long for exact sums in fp32
    x1, x2 = whole_numbers(M, k, seed=0), whole_numbers(k, N, seed=1)
    bias = torch.arange(N, dtype=torch.int32) * 1000
    scale = (draw(N, seed=2).abs() * 2**-20).to(
        torch.float32 if scale_dtype == torch.int64 else scale_dtype
    )
    packed = scale.view(torch.int32).to(torch.int64) if scale_dtype == torch.int64 else scale
    residual, gamma = draw(M, N, seed=3, dtype=dtype), draw(N, seed=4, dtype=dtype)
    arguments = slices(2, x1, x2, residual=residual, gamma=gamma, bias=bias, dequant_scale=packed)
    terms = [
        ((a["x1"].long() @ a["x2"].long() + bias).double() * scale.double()).to(dtype)
        for a in arguments
    ]
    expected = (terms[0] + terms[1]) + residual
    for y, *_ in ranks(2, group_ranks.mm_all_reduce_add_rms_norm, False, arguments):
        assert torch.equal(y, expected)


@pytest.mark.parametrize("form", ["tensor", "channel", "group"])
@pytest.mark.parametrize("offset", [True, False], ids=["offset", "no offset"])
def test_int8_weights_are_dequantised(ranks, form, offset):
    k, size = 200, 32  # 100 rows a rank: the last group has 4
    x1, x2 = draw(M, k, seed=0, dtype=torch.float16), whole_numbers(k, N, seed=1)
    shape = {"tensor": (1,), "channel": (N,), "group": (4, N)}[form]
    residual, gamma = draw(M, N, seed=3).half(), draw(N, seed=4).half()
    arguments = slices(
        2, x1, x2, residual=residual, gamma=gamma,
        antiquant_group_size=size if form == "group" else 0,
    )  # fmt: skip
    product = torch.zeros(M, N, dtype=torch.float64)
    for rank, given in enumerate(arguments):
        scale = draw(*shape, seed=10 + rank).abs().half() / 256
        shift = draw(*shape, seed=20 + rank).half() if offset else None
        given |= {"antiquant_scale": scale, "antiquant_offset": shift}
        weight = given["x2"].double()
        for row in range(len(weight)):
            group = row // size if form == "group" else slice(None)
            by, plus = (t if t is None or form != "group" else t[group] for t in (scale, shift))
            weight[row] = (weight[row] + (0 if plus is None else plus.double())) * by.double()
        product += given["x1"].double() @ weight
    y64, _ = truth(product, residual, gamma)
    for y, *_ in ranks(2, group_ranks.mm_all_reduce_add_rms_norm, False, arguments):
        assert y.dtype == torch.float16
        assert (y - y64).abs().max() <= 2 * torch.finfo(torch.float16).eps * y64.abs().max()


@pytest.mark.slow
def test_opcheck_and_compile(ranks):
    operands = (draw(*s, seed=1).float() for s in ((M, K), (K, N), (M, N), (N,)))
    for expected, compiled in ranks(2, group_ranks.opcheck_and_compile, *operands, timeout=180):
        torch.testing.assert_close(compiled, expected)


GOOD = {
    "x1": torch.ones(M, K),
    "x2": torch.ones(K, N),
    "residual": torch.ones(M, N),
    "gamma": torch.ones(N),
    "hcom": "0",
}
BYTES = {"x1": torch.ones(M, 64, dtype=torch.int8), "x2": torch.ones(64, N, dtype=torch.int8)}
W8 = {"x1": torch.ones(M, 64), "x2": BYTES["x2"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduce_op": "max"}, "reduce_op: expected one of 'sum', got 'max'"),
        ({"comm_turn": 1}, "comm_turn: expected one of 0, got 1"),
        ({"x1": torch.ones(K)}, "x1: expected 2 or 3 dimensions"),
        ({"x2": torch.ones(K + 1, N)}, "x2: expected 12 rows"),
        ({"x2": torch.ones(K, N).half()}, "x2: expected the dtype of x1"),
        ({"bias": torch.ones(N + 1)}, r"bias: expected shape \(10,\)"),
        ({"bias": torch.ones(N).half()}, "bias: expected dtype float32"),
        ({"residual": torch.ones(M, N + 1)}, r"residual: expected shape \(6, 10\)"),
        ({"residual": torch.ones(M, N).half()}, "residual: expected dtype float32"),
        ({"gamma": torch.ones(N + 1)}, r"gamma: expected shape \(10,\)"),
        ({"epsilon": 0.0}, "epsilon: expected a number greater than 0"),
        ({"x1": torch.ones(M, K, requires_grad=True)}, "has no gradient, but x1 requires one"),
        ({"hcom": 3}, "hcom: expected a process group"),
        ({"hcom": "nobody"}, "torch.distributed is not set up"),
        ({"antiquant_offset": torch.ones(1)}, "antiquant_offset: expected None without"),
        ({"antiquant_group_size": 32}, "antiquant_group_size: expected 0 without"),
        ({**W8, "antiquant_scale": torch.ones(3)}, r"antiquant_scale: expected shape \(1,\) or"),
        (
            {**W8, "antiquant_scale": torch.ones(2, N), "antiquant_group_size": 64},
            "antiquant_group_size: expected 0, or a multiple of 32 between 32 and k - 1 = 63",
        ),
        ({**BYTES, "dequant_scale": torch.ones(3)}, r"dequant_scale: expected shape \(1,\) or"),
        ({**BYTES, "dequant_scale": torch.ones(1)}, "residual: expected dtype float16"),
        (
            {**BYTES, "dequant_scale": torch.ones(1), "antiquant_scale": torch.ones(1)},
            "antiquant_scale: expected None together with dequant_scale",
        ),
        ({"dequant_scale": torch.ones(1)}, "x1: expected dtype int8"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(
        ValueError, match=f"mindspeed.ops.npu_mm_all_reduce_add_rms_norm.*{message}"
    ):
        npu_mm_all_reduce_add_rms_norm(**{**GOOD, **change})
