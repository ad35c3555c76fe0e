"""The restated fusion attention against torch's own attention with a mask written as loops."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.npu_emulator import rng
from tests.npu_emulator.reference_ops.attention import REFERENCE
from tests.npu_emulator.reference_ops.ring import npu_ring_attention_update

FORWARD, GRAD = REFERENCE["npu_fusion_attention"], REFERENCE["npu_fusion_attention_grad"]
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
PREFIX_MASK = torch.cat((TRIANGLE, (torch.arange(2048) >= 1024).expand(1024, 2048)))
SCALE = 0.3


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(b=2, n=4, groups=1, sq=5, skv=7, d=6, dv=6):
    """q, k, v and the output's gradient, [b, n, s, d]."""
    kv_heads = n // groups
    shapes = (b, n, sq, d), (b, kv_heads, skv, d), (b, kv_heads, skv, dv), (b, n, sq, dv)
    return [randn(*shape, seed=i) for i, shape in enumerate(shapes)]


def to_layout(t, layout):
    """[b, n, s, d] in a dense layout."""
    order = {"BNSD": "bnsd", "BSND": "bsnd", "BSH": "bsnd", "SBH": "sbnd"}[layout]
    t = t.permute(*("bnsd".index(letter) for letter in order))
    return (t.flatten(-2) if layout.endswith("H") else t).contiguous()


def oracle(q, k, v, dy, allowed=None, bias=0.0):
    """Output and gradients of attention by torch; `allowed` [b or 1, sq, skv]: True if seen."""
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    groups = q.size(1) // k.size(1)
    attn_mask = torch.zeros(1, 1, q.size(2), k.size(2)) + bias
    if allowed is not None:
        attn_mask = attn_mask.masked_fill(~allowed[:, None], -torch.inf)
    out = F.scaled_dot_product_attention(
        q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), attn_mask, scale=SCALE
    )
    return out.detach(), torch.autograd.grad(out, (q, k, v), dy)


def run(q, k, v, dy, heads, layout, **options):
    """Output and gradients of the restatement."""
    out, maximum, total, _, seed, offset, numels = FORWARD(
        q, k, v, heads, layout, scale=SCALE, **options
    )
    options.pop("dropout_mask", None)
    grads = GRAD(
        q, k, v, dy, heads, layout, scale_value=SCALE, softmax_max=maximum, softmax_sum=total,
        attention_in=out, seed=seed, offset=offset, numels=numels, **options,
    )  # fmt: skip
    return out, grads


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize("groups", [1, 2])
def test_layouts(layout, groups):
    tensors = problem(groups=groups, dv=4)
    out, grads = oracle(*tensors)
    got, got_grads = run(*(to_layout(t, layout) for t in tensors), 4, layout)
    assert_close(got, to_layout(out, layout))
    assert_close(got_grads[:3], tuple(to_layout(g, layout) for g in grads))


def test_statistics_are_those_of_the_softmax():
    q, k, v, _ = problem()
    logits = q @ k.transpose(-1, -2) * SCALE
    maximum, total = FORWARD(q, k, v, 4, "BNSD", scale=SCALE)[1:3]
    assert maximum.shape == total.shape == (2, 4, 5, 8)
    for lane in range(8):
        assert_close(maximum[..., lane], logits.amax(-1))
        assert_close(maximum[..., lane] + total[..., lane].log(), logits.logsumexp(-1))


def seen(rule, sq, skv):
    """A mask written as loops over positions."""
    allowed = torch.zeros(1, sq, skv, dtype=torch.bool)
    for i, j in itertools.product(range(sq), range(skv)):
        allowed[0, i, j] = rule(i, j)
    return allowed


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"sparse_mode": 1}, lambda i, j, d: (i + j) % 3 != 1),
        ({"sparse_mode": 0}, lambda i, j, d: (i + j) % 3 != 1),
        ({"sparse_mode": 2}, lambda i, j, d: j <= i),
        ({"sparse_mode": 3}, lambda i, j, d: j <= i + d),
        (
            {"sparse_mode": 4, "pre_tockens": 2, "next_tockens": 1},
            lambda i, j, d: i + d - 2 <= j <= i + d + 1,
        ),
        ({"sparse_mode": 5, "prefix": [3, 3]}, lambda i, j, d: j <= i + d or j < 3),
        ({"sparse_mode": 6, "prefix": [3, 3]}, lambda i, j, d: j <= i + d or j < 3),
    ],
)
def test_sparse_modes(options, rule):
    sq, skv = 5, 7
    allowed = seen(lambda i, j: rule(i, j, skv - sq), sq, skv)
    compressed = {6: PREFIX_MASK}.get(options["sparse_mode"], TRIANGLE)
    full = options["sparse_mode"] in (0, 1, 5)
    mask = ~allowed[:, None].expand(2, 1, sq, skv) if full else compressed
    tensors = problem()
    out, grads = oracle(*tensors, allowed)
    got, got_grads = run(*tensors, 4, "BNSD", atten_mask=mask, **options)
    assert_close(got, out)
    assert_close(got_grads[:3], grads)


def test_the_band_of_mode_0_starts_at_the_top_left():
    tensors = problem()
    allowed = seen(lambda i, j: i - 2 <= j <= i + 1, 5, 7)
    options = {"pre_tockens": 2, "next_tockens": 1, "atten_mask": ~allowed[0]}
    assert_close(run(*tensors, 4, "BNSD", **options)[0], oracle(*tensors, allowed)[0])
    everything = {**options, "atten_mask": None}  # without a mask the band means nothing
    assert_close(run(*tensors, 4, "BNSD", **everything)[0], oracle(*tensors)[0])


def test_prefixes_differ_by_batch():
    tensors = problem()
    allowed = torch.cat([seen(lambda i, j, p=p: j <= i + 2 or j < p, 5, 7) for p in (3, 6)])
    options = {"sparse_mode": 6, "prefix": [3, 6], "atten_mask": PREFIX_MASK}
    assert_close(run(*tensors, 4, "BNSD", **options)[0], oracle(*tensors, allowed)[0])


def packed(q_lengths, kv_lengths, groups=1):
    """Tensors of TND and the dense pieces they are made of."""
    pieces = [
        [t[0].transpose(0, 1) for t in problem(1, 4, groups, sq, skv)]
        for sq, skv in zip(q_lengths, kv_lengths, strict=True)
    ]
    ends = [list(itertools.accumulate(lengths)) for lengths in (q_lengths, kv_lengths)]
    return [torch.cat(column) for column in zip(*pieces, strict=True)], pieces, ends


def expected_tnd(pieces, rules):
    """The oracle for each sequence, joined."""
    outs = []
    for tensors, rule in zip(pieces, rules, strict=True):
        dense = [t.transpose(0, 1)[None] for t in tensors]
        sq, skv = dense[0].size(2), dense[1].size(2)
        out, grads = oracle(*dense, seen(lambda i, j, r=rule, d=skv - sq: r(i, j, d), sq, skv))
        outs.append([t[0].transpose(0, 1) for t in (out, *grads)])
    return [torch.cat(column) for column in zip(*outs, strict=True)]


@pytest.mark.parametrize("softmax_layout", ["", "TND"])
@pytest.mark.parametrize("groups", [1, 2])
def test_packed_sequences(groups, softmax_layout):
    tensors, pieces, (q_ends, kv_ends) = packed([3, 1, 4], [5, 1, 4], groups)
    expected = expected_tnd(pieces, [lambda i, j, d: j <= i + d] * 3)
    options = {"actual_seq_qlen": q_ends, "actual_seq_kvlen": kv_ends, "sparse_mode": 3}
    options |= {"atten_mask": TRIANGLE, "softmax_layout": softmax_layout}
    out, grads = run(*tensors, 4, "TND", **options)
    assert_close([out, *grads[:3]], expected)
    maximum = FORWARD(*tensors[:3], 4, "TND", scale=SCALE, **options)[1]
    assert maximum.shape == (8, 4, 8)
    q, k = (t.transpose(0, 1) for t in pieces[0][:2])  # the first sequence: 3 queries, 5 keys
    logits = q @ k.repeat_interleave(groups, 0).transpose(-1, -2) * SCALE
    logits = logits.masked_fill(~seen(lambda i, j: j <= i + 2, 3, 5)[0], -torch.inf)
    by_head = logits.amax(-1)
    first = by_head.t() if softmax_layout else by_head
    assert_close(maximum[..., 0].flatten()[:12], first.flatten())


def test_trailing_sequences_of_length_zero_are_not_computed():
    tensors, pieces, (q_ends, kv_ends) = packed([3, 2], [3, 2])
    short = {"actual_seq_qlen": [q_ends[0], 0], "actual_seq_kvlen": [kv_ends[0], 0]}
    out, grads = run(*tensors, 4, "TND", **short)
    first = expected_tnd(pieces[:1], [lambda i, j, d: True])
    assert_close([t[:3] for t in (out, *grads[:3])], first)
    assert not out[3:].any()


@pytest.mark.parametrize("mode", [7, 8])
def test_attention_over_split_keys_merges_to_the_full_result(mode):
    """The documentation's two examples: queries of the second sequence cut between two devices."""
    (q_lengths, kv_lengths) = ([3, 4, 4], [3, 6, 4]) if mode == 7 else ([3, 5, 4], [3, 4, 6])
    (q, k, v, dy), pieces, _ = packed(q_lengths, kv_lengths)
    rule = (lambda i, j, d: j <= i + d) if mode == 7 else (lambda i, j, d: j <= i)
    whole = expected_tnd(pieces, [rule] * 3)[0]
    if mode == 7:  # the first device has 2 of the 4 queries
        part, kv, ends = slice(0, 5), slice(0, 9), ([3, 5], [3, 9])
        band = {"pre_tockens": 6, "next_tockens": -2}
    else:  # the second device has the last 3 of the 5 queries, and the third sequence
        part, kv, ends = slice(5, 12), slice(3, 13), ([3, 7], [4, 10])
        band = {"pre_tockens": 4, "next_tockens": 1}
    out, _ = run(
        q[part], k[kv], v[kv], dy[part], 4, "TND", atten_mask=TRIANGLE, sparse_mode=mode,
        actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1], **band,
    )  # fmt: skip
    assert_close(out, whole[part])


def test_position_bias_is_scaled_with_the_product():
    tensors, pse = problem(), randn(1, 4, 5, 7, seed=9)
    out, grads = run(*tensors, 4, "BNSD", pse=pse)
    expected, expected_grads = oracle(*tensors, bias=pse * SCALE)
    assert_close(out, expected)
    assert_close(grads[:3], expected_grads)
    wanted = pse.clone().requires_grad_()
    attention = F.scaled_dot_product_attention(*tensors[:3], wanted * SCALE, scale=SCALE)
    assert_close(grads[3], torch.autograd.grad(attention, wanted, tensors[3])[0])


@pytest.mark.parametrize("pse_type", [0, 2, 3])
def test_position_bias_of_version_2(pse_type):
    q, k, v, dy = problem(sq=6, skv=6)
    distance = torch.tensor([[abs(i + 3 - j - 1) for j in range(6)] for i in range(6)]).float()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    pse = randn(2, 4, 6, 6, seed=9) if pse_type == 0 else slopes
    bias = {0: pse, 2: -slopes[:, None, None] * distance}.get(
        pse_type, -slopes[:, None, None] * distance.sqrt()
    )
    options = {"pse": pse, "pse_type": pse_type}
    if pse_type:
        options |= {"q_start_idx": [3], "kv_start_idx": [1]}
    out, maximum, total, *_ = REFERENCE["npu_fusion_attention_v2"](
        q, k, v, 4, "BNSD", scale=SCALE, **options
    )
    grads = REFERENCE["npu_fusion_attention_grad_v2"](
        q, k, v, dy, 4, "BNSD", scale_value=SCALE, softmax_max=maximum, softmax_sum=total,
        attention_in=out, **options,
    )  # fmt: skip
    expected, expected_grads = oracle(q, k, v, dy, bias=bias)
    assert_close(out, expected)
    assert_close(grads[:3], expected_grads)
    assert (grads[3] is None) == (pse_type != 0)


def test_a_sink_is_one_more_logit():
    """torch_npu's own example: one more column, dropped before the product with the values."""
    q, k, v, dy = problem()
    sink = torch.tensor([-0.2, 0.0, 0.1, 2.0])
    inputs = [t.clone().requires_grad_() for t in (q, k, v, sink)]
    logits = inputs[0] @ inputs[1].transpose(-1, -2) * SCALE
    column = inputs[3].view(1, 4, 1, 1).expand(2, 4, 5, 1)
    expected = torch.cat((logits, column), -1).softmax(-1)[..., :-1] @ inputs[2]
    out, grads = run(q, k, v, dy, 4, "BNSD", sink=sink)
    assert_close(out, expected.detach())
    assert_close((*grads[:3], grads[4]), torch.autograd.grad(expected, inputs, dy))


def test_fully_masked_rows_are_nan():
    tensors = problem(sq=7, skv=5)
    out, _ = run(*tensors, 4, "BNSD", sparse_mode=3, atten_mask=TRIANGLE)
    assert out[:, :, :2].isnan().all()
    assert out[:, :, 2:].isfinite().all()


def test_dropout_is_repeated_in_the_gradient(monkeypatch):
    monkeypatch.setattr(rng, "reserve", lambda: (5, 8))
    q, k, v, dy = problem()
    out, grads = run(q, k, v, dy, 4, "BNSD", keep_prob=0.7)
    kept = torch.rand(2, 4, 5, 7, generator=rng.cpu_generator(5, 8)) < 0.7
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    p = (inputs[0] @ inputs[1].transpose(-1, -2) * SCALE).softmax(-1)
    expected = (p * kept / 0.7) @ inputs[2]
    assert_close(out, expected.detach())
    assert_close(grads[:3], torch.autograd.grad(expected, inputs, dy))


def test_version_3_takes_and_returns_tensors():
    tensors, pieces, ends = packed([3, 4], [3, 4])
    q_ends, kv_ends = (torch.tensor(e) for e in ends)
    options = {"actual_seq_qlen": q_ends, "actual_seq_kvlen": kv_ends}
    out, maximum, total, _, seed, offset = REFERENCE["npu_fusion_attention_v3"](
        *tensors[:3], 4, "TND", scale=SCALE, **options
    )
    grads = REFERENCE["npu_fusion_attention_grad_v3"](
        *tensors, 4, "TND", scale_value=SCALE, softmax_max=maximum, softmax_sum=total,
        attention_in=out, seed=seed, offset=offset, **options,
    )  # fmt: skip
    assert_close([out, *grads[:3]], expected_tnd(pieces, [lambda i, j, d: True] * 2))


def test_partial_attentions_add_up():
    """Ring attention: outputs merge, and gradients with the merged statistics add up."""
    q, k, v, dy = problem()
    halves = [(k[:, :, part], v[:, :, part]) for part in (slice(0, 3), slice(3, 7))]
    first, second = (
        [to_layout(results[0], "SBH"), *results[1:3]]
        for results in (FORWARD(q, *half, 4, "BNSD", scale=SCALE)[:3] for half in halves)
    )
    merged, maximum, total = npu_ring_attention_update(*first, *second)
    merged = merged.unflatten(-1, (4, -1)).permute(1, 2, 0, 3)
    out, (dq, dk, dv) = oracle(q, k, v, dy)
    assert_close(merged, out)
    parts = [
        GRAD(q, *half, dy, 4, "BNSD", scale_value=SCALE, softmax_max=maximum, softmax_sum=total,
             attention_in=merged)
        for half in halves
    ]  # fmt: skip
    assert_close(parts[0][0] + parts[1][0], dq)
    assert_close(torch.cat([part[1] for part in parts], 2), dk)
    assert_close(torch.cat([part[2] for part in parts], 2), dv)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_layout": "BNDS"}, "layout BNDS is unknown"),
        ({"input_layout": "TND"}, "needs actual_seq_qlen"),
        ({"sparse_mode": 7}, "need TND"),
        ({"keep_prob": 0.0}, r"keep_prob is in \(0, 1\]"),
        ({"sparse_mode": 2, "atten_mask": TRIANGLE.t()}, "needs the compressed mask"),
        ({"sparse_mode": 6, "atten_mask": TRIANGLE, "prefix": [1, 1]}, r"\[3072, 2048\]"),
    ],
)
def test_documented_limits_are_errors(options, message):
    q, k, v, _ = problem()
    layout = options.pop("input_layout", "BNSD")
    with pytest.raises(ValueError, match=message):
        FORWARD(q, k, v, 4, layout, **options)
    with pytest.raises(NotImplementedError, match="does not restate padding_mask"):
        FORWARD(q, k, v, 4, "BNSD", padding_mask=q)
