"""Quantised grouped products and the feed-forward network, against formulas in float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from mindspeed.ops import OperatorError
from mindspeed.ops.ffn import npu_ffn
from mindspeed.ops.quant_gmm import int_product, npu_quant_gmm, npu_quant_gmm_v2
from mindspeed.ops.weight_quant_gmm import npu_weight_quant_gmm, npu_weight_quant_gmm_v2

WITHOUT_VNNI = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
SIZES = [3, 0, 5]
ENDS = [3, 3, 8]
K, N = 24, 6

ACTIVATIONS = {
    "none": lambda v: v,
    "relu": lambda v: max(v, 0.0),
    "gelu": lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))),
    "gelu_tanh": lambda v: (
        0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    ),
    "fastgelu": lambda v: v / (1 + math.exp(-1.702 * v)),
    "silu": lambda v: v / (1 + math.exp(-v)),
}
BY_CODE = {0: "none", 1: "relu", 2: "gelu_tanh", 4: "fastgelu", 5: "silu"}


def act(name, x):
    return x.double().apply_(ACTIVATIONS[name])


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int8(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)


def by_group(function, x):
    parts = x.split(SIZES)
    return torch.cat([function(g, rows) for g, rows in enumerate(parts)])


def bits(scale):
    """fp32 numbers in the low half of int64."""
    return scale.float().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def assert_rounded(out, truth, dtype):
    assert out.dtype == dtype
    allowed = truth.abs() * torch.finfo(dtype).eps / 2 + 1e-4 * truth.abs().max()
    assert ((out.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("code", BY_CODE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int8_products(code, dtype):
    x, w, bias = int8(8, K), int8(3, K, N, seed=1), int8(3, N, seed=2).int() * 50
    scale, per_token = normal(3, N, seed=3).float().abs() / 5e4, normal(8, seed=4).float().abs()

    def formula(g, rows):
        return (rows.double() @ w[g].double() + bias[g]) * scale[g].double()

    truth = act(BY_CODE[code], by_group(formula, x) * per_token.double()[:, None])
    options = {
        "per_token_scale": per_token, "bias": bias, "output_dtype": dtype, "act_type": code
    }  # fmt: skip
    out = npu_quant_gmm(x, w, scale, group_list=ENDS, **options)
    assert_rounded(out, truth, dtype)
    same = npu_quant_gmm_v2(x, w, scale, group_list=torch.tensor(SIZES), **options)
    assert torch.equal(same, out)
    assert torch.equal(npu_quant_gmm(x, w, bits(scale), group_list=ENDS, **options), out)


def test_int8_output_is_rounded_and_clamped():
    x, w = int8(8, K), int8(3, K, N, seed=1)
    scale = torch.full((3, N), 1 / 256.0)
    truth = by_group(lambda g, rows: rows.double() @ w[g].double() / 256, x)
    out = npu_quant_gmm(x, w, bits(scale), group_list=ENDS, output_dtype=torch.int8)
    assert torch.equal(out.double(), truth.round().clamp(-128, 127))
    assert out.min() == -128 and out.max() == 127  # some would not fit


def test_sums_of_products_are_exact():
    """fp32 would lose the last bits: 4000 products of -128 and -127, odd at the end."""
    x, w = torch.full((1, 4001), -128, dtype=torch.int8), torch.full((4001, 1), -127).to(torch.int8)
    w[0] = 1
    expected = -128 * 1 + 4000 * 128 * 127
    assert int_product(x, w).item() == expected
    assert float(torch.tensor(float(expected), dtype=torch.float32)) != expected + 1


_PRODUCTS = """
import torch
from mindspeed.ops.quant_gmm import int_product

for seed, (m, k, n) in enumerate([(16, 64, 32), (1, 64, 32), (16, 33, 1), (1, 1, 1), (7, 300, 65)]):
    draw = torch.Generator().manual_seed(seed)
    x, w = (torch.randint(-128, 128, s, generator=draw).to(torch.int8) for s in ((m, k), (k, n)))
    x[0], w[:, 0] = 127, -128
    for left, right in ((x, w), (x.t().contiguous().t(), w.t().contiguous().t())):
        assert torch.equal(int_product(left, right).long(), x.long() @ w.long()), (m, k, n)
for dtype in (torch.bfloat16, torch.float16):  # more ones than its digits can count
    ones, zeros = torch.ones(4, 4096, dtype=dtype), torch.zeros(4, 4, dtype=dtype)
    for product in (ones @ ones.t(), torch.addmm(zeros, ones, ones.t()), ones[:1] @ ones.t()):
        assert (product == 4096).all(), (dtype, product)
"""


@pytest.mark.parametrize("limited", [False, True], ids=["as it is", "AVX2"])
def test_products_are_exact_on_processors_without_vnni(limited):
    """oneDNN's sums of pairs saturate there, in more than half of random entries.

    Its other products that operators rest on, of 16-bit floats, add in fp32 there too.
    """
    environment = os.environ | (WITHOUT_VNNI if limited else {})
    found = subprocess.run(
        [sys.executable, "-c", _PRODUCTS], env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("code", BY_CODE)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int8_weights(code, offset, dtype):
    x, w = normal(8, K, dtype=dtype) / 8, int8(3, K, N, seed=1)
    scale = normal(3, N, seed=2).to(dtype) / 64
    shift = normal(3, N, seed=3).to(dtype) if offset else None
    bias = normal(3, N, seed=4).to(torch.float16 if dtype == torch.float16 else torch.float32)

    def formula(g, rows):
        matrix = (w[g].double() + (shift[g].double() if offset else 0)) * scale[g].double()
        return rows.double() @ matrix + bias[g].double()

    truth = act(BY_CODE[code], by_group(formula, x))
    options = {"antiquant_offset": shift, "bias": bias, "act_type": code}
    out = npu_weight_quant_gmm(x, w, scale, group_list=torch.tensor(ENDS), **options)
    assert_rounded(out, truth, dtype)
    same = npu_weight_quant_gmm_v2(x, w, scale, group_list=torch.tensor(SIZES), **options)
    assert torch.equal(same, out)


class TestFfn:
    """Two linear layers with an activation between them."""

    @pytest.mark.parametrize("name", ["fastgelu", "gelu", "relu", "silu"])
    @pytest.mark.parametrize("experts", [False, True])
    def test_activations(self, name, experts):
        x = normal(8, 6)
        w1, w2 = normal(3, 6, 10, seed=1), normal(3, 10, 4, seed=2)
        b1, b2 = normal(3, 10, seed=3), normal(3, 4, seed=4)
        one = lambda g, rows: act(name, rows @ w1[g] + b1[g]) @ w2[g] + b2[g]  # noqa: E731
        if experts:
            truth = by_group(one, x)
            given = {"bias1": b1, "bias2": b2}
            out = npu_ffn(x, w1, w2, name, expert_tokens=SIZES, **given)
            index = npu_ffn(x, w1, w2, name, expert_tokens_index=torch.tensor(ENDS), **given)
            assert torch.equal(index, out)
        else:
            truth = one(1, x)
            out = npu_ffn(x.view(2, 4, 6), w1[1], w2[1], name, bias1=b1[1], bias2=b2[1])
            out = out.view(8, 4)
        torch.testing.assert_close(out, truth, rtol=0, atol=1e-12)

    @pytest.mark.parametrize(
        ("name", "plain"), [("geglu", "gelu"), ("swiglu", "silu"), ("reglu", "relu")]
    )
    def test_gates(self, name, plain):
        x, w1, w2 = normal(8, 6), normal(6, 10, seed=1), normal(5, 4, seed=2)
        gate, up = (x @ w1).chunk(2, -1)
        truth = (act(plain, gate) * up) @ w2
        torch.testing.assert_close(npu_ffn(x, w1, w2, name), truth, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("experts", [False, True])
    def test_int8_everything(self, experts):
        x, w1, w2 = int8(8, K), int8(3, K, 10, seed=1), int8(3, 10, 4, seed=2)
        d1, d2 = normal(3, 10, seed=3).float().abs() / 5e4, normal(3, 4, seed=4).float().abs()
        b1, scale, offset = int8(3, 10, seed=5).int(), torch.tensor([9.0, 5.0, 7.0]), torch.ones(3)

        def one(g, rows):
            hidden = ((rows.double() @ w1[g].double() + b1[g]) * d1[g].double()).half()
            hidden = act("silu", hidden) * float(scale[g]) + 1.0
            hidden = hidden.round().clamp(-128, 127)
            return hidden @ w2[g].double() * d2[g].double()

        if experts:
            truth, index, more = by_group(one, x), slice(None), {"expert_tokens": SIZES}
        else:
            truth, index, more = one(1, x), 1, {}
        scale_given = scale if experts else scale[1:2]
        out = npu_ffn(
            x, w1[index], w2[index], "silu", bias1=b1[index], deq_scale1=bits(d1)[index],
            deq_scale2=d2[index], scale=scale_given, offset=offset[: len(scale_given)], **more,
        )  # fmt: skip
        # Where fp16 rounds the hidden number to the other side of a half, the result moves by w2.
        assert (out.double() - truth).abs().max() < 130 * d2.max() + 1e-3 * truth.abs().max()
        assert ((out.double() - truth).abs() <= 2e-3 * truth.abs() + 0.05).double().mean() > 0.9

    def test_int8_weights(self):
        x, w1, w2 = normal(8, K).half() / 8, int8(K, 10, seed=1), int8(10, 4, seed=2)
        s1, s2 = normal(10, seed=3).half() / 64, normal(4, seed=4).half() / 64
        o1 = normal(10, seed=5).half()
        hidden = act("relu", x.double() @ ((w1.double() + o1.double()) * s1.double()))
        truth = hidden @ (w2.double() * s2.double())
        out = npu_ffn(
            x, w1, w2, "relu", antiquant_scale1=s1, antiquant_scale2=s2, antiquant_offset1=o1
        )
        assert (out.double() - truth).abs().max() < 4e-3 * truth.abs().max()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"activation": "tanh"}, "npu_ffn: activation: expected one of 'fastgelu', 'gelu'"),
            ({"activation": "swiglu"}, "activation: expected one of .* with experts, got 'swiglu'"),
            ({"expert_tokens": None}, "expert_tokens: expected a group for each of the 8 rows"),
            ({"expert_tokens": [3, 0, 4]}, "expert_tokens: expected sizes that add up to the 8"),
            ({"expert_tokens_index": ENDS}, "expert_tokens_index: expected None beside"),
            ({"weight2": torch.zeros(3, 9, 4)}, r"weight2: expected shape \(3, 10, 4\)"),
            ({"bias1": torch.zeros(10)}, r"bias1: expected shape \(3, 10\)"),
            ({"x": torch.zeros(8, 6, requires_grad=True)}, "has no gradient, but x"),
            ({"deq_scale1": torch.zeros(3, 10)}, "scale: expected a tensor for an int8 x"),
            (
                {"deq_scale1": torch.zeros(3, 10), "antiquant_scale1": torch.zeros(3, 10)},
                "antiquant_scale1: expected None beside deq_scale1",
            ),
        ],
    )
    def test_bad_arguments(self, change, message):
        given = {
            "x": torch.zeros(8, 6),
            "weight1": torch.zeros(3, 6, 10),
            "weight2": torch.zeros(3, 10, 4),
            "activation": "gelu",
            "expert_tokens": SIZES,
        }
        with pytest.raises(OperatorError, match=message):
            npu_ffn(**(given | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(8, K)}, "npu_quant_gmm: x: expected dtype int8"),
        ({"act_type": 3}, "act_type: expected one of 0, 1, 2, 4, 5, got 3"),
        ({"output_dtype": torch.float32}, "output_dtype: expected one of float16, bfloat16, int8"),
        ({"output_dtype": torch.int8}, "scale: expected int64 for an int8 output"),
        ({"scale": torch.zeros(N)}, r"scale: expected shape \(3, 6\)"),
        ({"bias": torch.zeros(3, N)}, "bias: expected dtype int32"),
        ({"group_list": None}, "group_list: expected a group for each"),
        ({"offset": torch.zeros(1)}, "offset: expected None"),
    ],
)
def test_bad_arguments_of_quant_gmm(change, message):
    given = {
        "x": int8(8, K), "weight": int8(3, K, N), "scale": torch.ones(3, N), "group_list": ENDS
    }  # fmt: skip
    with pytest.raises(OperatorError, match=message):
        npu_quant_gmm(**(given | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(8, K)}, "npu_weight_quant_gmm: x: expected dtype float16, bfloat16"),
        ({"weight": torch.zeros(3, K, N)}, "weight: expected dtype int8"),
        ({"antiquant_scale": torch.ones(3, N)}, "antiquant_scale: expected dtype float16"),
        ({"bias": torch.zeros(3, N)}, "bias: expected dtype float16, got float32"),
        ({"act_type": 3}, "act_type: expected one of"),
    ],
)
def test_bad_arguments_of_weight_quant_gmm(change, message):
    given = {
        "x": torch.zeros(8, K).half(),
        "weight": int8(3, K, N),
        "antiquant_scale": torch.ones(3, N).half(),
        "group_list": ENDS,
    }
    with pytest.raises(OperatorError, match=message):
        npu_weight_quant_gmm(**(given | change))


def test_the_second_versions_take_tensors():
    with pytest.raises(OperatorError, match="npu_quant_gmm_v2: group_list: expected a tensor"):
        npu_quant_gmm_v2(int8(8, K), int8(3, K, N), torch.ones(3, N), group_list=SIZES)
    with pytest.raises(OperatorError, match="npu_weight_quant_gmm_v2: group_list: expected a"):
        npu_weight_quant_gmm_v2(
            torch.zeros(8, K).half(), int8(3, K, N), torch.ones(3, N).half(), group_list=SIZES
        )
