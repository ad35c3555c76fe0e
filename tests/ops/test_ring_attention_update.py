"""Merging partial attentions equals attention over all keys, in any order."""

from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed.ops import OperatorError
from mindspeed.ops.fusion_attention_v2 import npu_fusion_attention
from mindspeed.ops.npu_ring_attention_update import npu_ring_attention_update
from tests.ops import ring_update_jobs
from tests.ops.traffic import model_bytes, traffic


def partial(scores, values):
    """out, max and sum of a softmax over some keys, eight lanes each."""
    top = scores.amax(-1, keepdim=True)
    base = top.masked_fill(top == -torch.inf, 0)
    weights = (scores - base).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights @ values / total.masked_fill(total == 0, 1)
    return out, top.expand(*top.shape[:-1], 8), total.expand(*total.shape[:-1], 8)


def to_layout(parts, layout):
    out, top, total = parts
    if layout == "SBH":
        return out.permute(2, 0, 1, 3).flatten(2), top, total
    return tuple(x[0].transpose(0, 1) for x in parts)


def problem(b, splits, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(b, 3, 5, sum(splits), generator=generator, dtype=dtype) * 4
    values = torch.randn(b, 3, sum(splits), 8, generator=generator, dtype=dtype)
    scores[:, :, 1] = -torch.inf
    scores[:, 1, 2, : splits[0]] = -torch.inf
    pieces = zip(scores.split(splits, -1), values.split(splits, 2), strict=True)
    return partial(scores, values), [partial(*piece) for piece in pieces]


@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_any_order_of_any_split_equals_one_softmax(layout):
    whole, parts = problem(1 if layout == "TND" else 2, [2, 5, 1])
    whole, parts = to_layout(whole, layout), [to_layout(part, layout) for part in parts]
    for order in itertools.permutations(parts):
        merged = order[0]
        for part in order[1:]:
            merged = npu_ring_attention_update(*merged, *part, layout=layout)
        for got, expected in zip(merged, whole, strict=True):
            torch.testing.assert_close(got, expected.contiguous())
    blind = merged[0][1]
    assert (blind == 0).all()
    assert (merged[2].select(2 if layout == "SBH" else 0, 1) == 0).all()


def test_statistics_of_the_library_merge():
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 2, 16) for _ in range(3))
    whole = npu_fusion_attention(q, k, v, 2, "SBH", scale=0.3)[:3]
    parts = [npu_fusion_attention(q, k[s], v[s], 2, "SBH", scale=0.3)[:3]
             for s in (slice(0, 2), slice(2, 6))]  # fmt: skip
    merged = npu_ring_attention_update(*parts[0], *parts[1])
    torch.testing.assert_close(merged[0], whole[0])
    torch.testing.assert_close(merged[1] + merged[2].log(), whole[1] + whole[2].log())


def test_a_running_result_in_fp32_is_rounded_once():
    """Over 64 steps the 16-bit one drifts; fp32 with one rounding at the end does not."""
    whole, parts = problem(1, [2] * 64, torch.float32)
    exact, *_ = to_layout(whole, "SBH")
    parts = [to_layout(part, "SBH") for part in parts]

    def run(running):
        merged = (parts[0][0].to(running), *parts[0][1:])
        for out, top, total in parts[1:]:
            merged = npu_ring_attention_update(*merged, out.bfloat16(), top, total)
        return (merged[0].bfloat16().float() - exact).abs().mean()

    assert run(torch.float32) < 0.5 * run(torch.bfloat16)


def test_bytes():
    """Both outputs read, one written; the formula in eager torch moves several times that."""
    (_, (first, second, *_)) = problem(2, [3, 3], torch.float32)
    first, second = (to_layout(x, "SBH") for x in (first, second))
    out = npu_ring_attention_update(*first, *second)
    assert model_bytes((first, second), out) < 0.4 * eager_bytes(first, second)


def eager_bytes(first, second):
    with traffic() as count:
        (prev, m1, s1), (cur, m2, s2) = first, second
        top = torch.maximum(m1, m2)
        a, b = s1 * torch.exp(m1 - top), s2 * torch.exp(m2 - top)
        total = a + b
        a, b = ((x / total)[..., :1].permute(2, 0, 1, 3) for x in (a, b))
        a, b = (x.expand(*x.shape[:-1], 8).flatten(2) for x in (a, b))
        prev * a + cur * b
    return count.bytes


@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_npu_equals_the_cpu_also_for_fully_masked_rows(npu, layout):
    ours, expected = npu(ring_update_jobs.npu_and_cpu, layout)
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "BSH"}, "layout: expected one of .*, got 'BSH'"),
        ({"cur_attn_out": torch.ones(5, 2, 8)}, "cur_attn_out: expected shape"),
        ({"cur_attn_out": torch.ones(5, 2, 24).half()}, None),
        ({"prev_attn_out": torch.ones(5, 2, 24).half()}, "cur_attn_out: expected the dtype"),
        ({"cur_softmax_sum": torch.ones(2, 3, 5)}, "cur_softmax_sum: expected shape"),
        ({"cur_softmax_max": torch.ones(2, 3, 5, 8).half()}, "cur_softmax_max: expected dtype"),
        ({"prev_attn_out": torch.ones(5, 2, 24, requires_grad=True)}, "has no gradient"),
        ({"layout": "TND"}, "prev_softmax_max: expected 3 dimensions"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    names = ("attn_out", "softmax_max", "softmax_sum")
    shapes = ((5, 2, 24), (2, 3, 5, 8), (2, 3, 5, 8))
    given = {
        f"{kind}_{name}": torch.ones(shape)
        for kind in ("prev", "cur")
        for name, shape in zip(names, shapes, strict=True)
    }
    if message is None:
        npu_ring_attention_update(**{**given, **change})
        return
    with pytest.raises(
        OperatorError, match=r"mindspeed\.ops\.npu_ring_attention_update:? " + message
    ):
        npu_ring_attention_update(**{**given, **change})
