"""Attention against an explicit softmax in fp64, for every mask, layout and head count."""

from __future__ import annotations

import functools

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.instruments import FlopCounter
from mindspeed.te import attention
from mindspeed.te.dot_product import DotProductAttention
from mindspeed.te.masks import visibility
from mindspeed.testing import assert_close_with_grads


def reference(q, k, v, keep=None, scale=None, bias=None, sink=None):
    """Explicit attention on [s, b, h, d]; rows that see nothing are zero."""
    dtype, (q, k, v) = q.dtype, (x.double().permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    scores = scores if bias is None else scores + bias.double()
    scores = scores if keep is None else scores.masked_fill(~keep, float("-inf"))
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.double().exp().view(1, -1, 1, 1)
    out = (weights / total.clamp(min=1e-300)) @ v
    return out.permute(2, 0, 1, 3).flatten(2).to(dtype)


def band(len_q, len_k, left, right, offset):
    keep = torch.zeros(len_q, len_k, dtype=torch.bool)
    for i in range(len_q):
        for j in range(len_k):
            low = left < 0 or j >= i + offset - left
            keep[i, j] = low and (right < 0 or j <= i + offset + right)
    return keep


def qkv(len_q=7, len_k=7, batch=2, heads=4, groups=4, size=8, size_v=8, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = ((len_q, heads, size), (len_k, groups, size), (len_k, groups, size_v))
    return tuple(torch.randn(s, batch, h, d).to(dtype) for s, h, d in shapes)


def module(**options):
    return DotProductAttention(4, 8, **{"attn_mask_type": "causal", **options})


@pytest.mark.parametrize(
    ("mask_type", "given", "window"),
    [("causal", None, (-1, 0)), ("no_mask", None, (-1, -1)), ("causal", (3, 0), (3, 0))],
)
def test_window_is_given_by_left_and_right_size(mask_type, given, window):
    assert module(attn_mask_type=mask_type, window_size=given).window_size == window


@pytest.mark.parametrize("groups", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("size_v", [8, 4], ids=["equal", "mla"])
@pytest.mark.parametrize("window", [None, (3, 0)], ids=["full", "window"])
def test_causal_attention(groups, size_v, window):
    attention = module(window_size=window, softmax_scale=0.3)
    keep = band(7, 7, 3 if window else -1, 0, 0)
    assert_close_with_grads(
        lambda *x: attention(*x),
        lambda *x: reference(*x, keep, 0.3),
        qkv(groups=groups, size_v=size_v),
        rtol=0,
        atol=2e-6,
    )


def test_grouped_heads_run_the_flash_kernel_of_a_cpu_whose_torch_repeats_none(monkeypatch):
    """torch 2.7 takes its formula for them, with the scores that a causal mask hides."""
    monkeypatch.setattr(attention, "cpu_attention_groups_heads", lambda: False)
    keep = band(7, 7, -1, 0, 0)
    run, expected = module(), functools.partial(reference, keep=keep)
    assert_close_with_grads(lambda *x: run(*x), expected, qkv(groups=2), rtol=0, atol=2e-6)
    with FlopCounter() as counter:
        run(*qkv(groups=2))
    batch, heads, size, visible = 2, 4, 8, 7 * 8 // 2
    assert counter.count.total == 2 * 2 * batch * heads * size * visible


@pytest.mark.parametrize(
    ("mask_type", "offset", "right"),
    [("causal", 0, 0), ("causal_bottom_right", 4, 0), ("no_mask", 4, -1)],
)
@pytest.mark.parametrize("left", [-1, 2])
def test_alignment_of_masks_when_keys_outnumber_queries(mask_type, offset, right, left):
    attention = module(attn_mask_type=mask_type, window_size=(left, right))
    keep = band(3, 7, left, right, offset)
    assert_close_with_grads(
        lambda *x: attention(*x), lambda *x: reference(*x, keep), qkv(3, 7), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("given", ["mask", "lengths"])
def test_padding(causal, given):
    lengths = torch.tensor([5, 7])
    real = torch.arange(7)[None] < lengths[:, None]
    keep = real[:, None, None, :] & (band(7, 7, -1, 0, 0) if causal else True)
    attention = module(attn_mask_type="padding_causal" if causal else "padding")
    options = {"attention_mask": ~real[:, None, None, :]}
    if given == "lengths":
        cu = torch.tensor([0, 5, 12])
        options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    assert_close_with_grads(
        lambda *x: attention(*x, **options),
        lambda *x: reference(*x, keep),
        qkv(),
        rtol=0,
        atol=2e-6,
    )


def test_padding_causal_bottom_right_aligns_each_sequence_at_its_own_end():
    masks = tuple(
        ~(torch.arange(n)[None] < torch.tensor(lengths)[:, None])[:, None, None, :]
        for n, lengths in ((4, (2, 4)), (7, (5, 7)))
    )
    seen = visibility("padding_causal_bottom_right", 4, 7, attention_mask=masks)
    first = band(4, 7, -1, 0, 3) & (torch.arange(7) < 5)
    assert torch.equal(seen.keep[0, 0], first)
    assert torch.equal(seen.keep[1, 0], band(4, 7, -1, 0, 3))


def test_arbitrary_mask_and_a_fully_masked_row():
    torch.manual_seed(1)
    masked = torch.rand(2, 1, 7, 7) < 0.4
    masked[0, 0, 3] = True
    attention = module(attn_mask_type="arbitrary")
    assert_close_with_grads(
        lambda *x: attention(*x, masked),
        lambda *x: reference(*x, ~masked),
        qkv(),
        rtol=0,
        atol=2e-6,
    )


@pytest.mark.parametrize("kind", ["post_scale_bias", "pre_scale_bias"])
def test_bias_and_its_gradient(kind):
    attention, keep = module(), band(7, 7, -1, 0, 0)
    factor = 8**-0.5 if kind == "pre_scale_bias" else 1.0
    bias = torch.randn(1, 4, 7, 7)
    assert_close_with_grads(
        lambda q, k, v, b: attention(q, k, v, core_attention_bias_type=kind, core_attention_bias=b),
        lambda q, k, v, b: reference(q, k, v, keep, bias=b * factor),
        (*qkv(), bias),
        rtol=0,
        atol=2e-6,
    )


@pytest.mark.parametrize("groups", [4, 2])
def test_learnable_sink_and_its_gradient(groups):
    attention, keep = module(softmax_type="learnable"), band(7, 7, -1, 0, 0)

    def ours(q, k, v, sink):
        del attention.softmax_offset
        attention.softmax_offset = sink
        return attention(q, k, v)

    assert_close_with_grads(
        ours,
        lambda q, k, v, s: reference(q, k, v, keep, sink=s),
        (*qkv(groups=groups), torch.randn(4)),
        rtol=0,
        atol=3e-6,
    )


def test_off_by_one_softmax_is_a_sink_with_score_zero():
    attention = module(softmax_type="off-by-one", attn_mask_type="no_mask")
    out = attention(*qkv())
    torch.testing.assert_close(out, reference(*qkv(), sink=torch.zeros(4)), rtol=0, atol=2e-6)
    assert "softmax_offset" not in attention.state_dict()


def test_bshd_is_sbhd_with_other_axes():
    attention, tensors = module(), qkv()
    out = attention(*(x.transpose(0, 1) for x in tensors), qkv_format="bshd")
    assert torch.equal(out.transpose(0, 1), attention(*tensors))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mask_type", ["padding_causal", "padding"])
def test_packed_documents_equal_documents_alone(padded, mask_type):
    lengths, starts = (3, 6, 1), (0, 4, 12) if padded else (0, 3, 9)
    total = 16 if padded else 10
    torch.manual_seed(2)
    q, k, v = torch.randn(total, 4, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 4)
    options = {"cu_seqlens_q": torch.tensor([0, 3, 9, 10]), "qkv_format": "thd"}
    options["cu_seqlens_kv"] = options["cu_seqlens_q"]
    if padded:
        options["cu_seqlens_q_padded"] = options["cu_seqlens_kv_padded"] = torch.tensor(
            [*starts, 16]
        )
    attention = DotProductAttention(4, (8, 4), 2, attn_mask_type=mask_type)

    def alone(*tensors):
        out = torch.zeros(total, 16)
        for start, length in zip(starts, lengths, strict=True):
            rows = slice(start, start + length)
            keep = band(length, length, -1, 0, 0) if "causal" in mask_type else None
            part = reference(*(x[rows].unsqueeze(1) for x in tensors), keep)
            out = out.index_copy(0, torch.arange(start, start + length), part.squeeze(1))
        return out

    assert_close_with_grads(
        lambda *x: attention(*x, **options), alone, (q, k, v), rtol=0, atol=2e-6
    )


def test_max_logit_is_the_largest_visible_score_of_each_head():
    q, k, v = qkv(groups=2)
    out, largest = module(return_max_logit=True)(q, k, v)
    keys = k.permute(1, 2, 0, 3).repeat_interleave(2, 1)
    scores = q.permute(1, 2, 0, 3) @ keys.transpose(-1, -2) * 8**-0.5
    scores = scores.masked_fill(~band(7, 7, -1, 0, 0), float("-inf"))
    torch.testing.assert_close(largest, scores.amax((0, 2, 3)))
    assert torch.equal(out, module()(q, k, v))


def test_dropout_draws_from_the_tracker_and_only_in_training():
    class Tracker:
        forks = 0

        def fork(self):
            Tracker.forks += 1
            return torch.random.fork_rng()

    attention = module(attention_dropout=0.5, get_rng_state_tracker=Tracker)
    whole = module()(*qkv())
    assert not torch.equal(attention(*qkv()), whole)
    attention.eval()
    assert torch.equal(attention(*qkv()), whole)
    attention.train().sequence_parallel = True
    attention(*qkv())
    assert Tracker.forks == 1


def test_bf16_is_as_exact_as_its_inputs():
    tensors = qkv(dtype=torch.bfloat16)
    out = module()(*tensors)
    expected = reference(*tensors, band(7, 7, -1, 0, 0))
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)


def test_unsupported_arguments_over_a_sharded_sequence_are_refused():
    class Group:
        def size(self):
            return 2

    attention = module(cp_group=Group())
    with pytest.raises(NotImplementedError, match="--context-parallel-size 2"):
        attention(*qkv(), attn_mask_type="padding")
    with pytest.raises(ConfigError, match=r"document of 3 tokens .* divisible by 2\*CP=4"):
        attention(*(x[:, 0] for x in qkv()), qkv_format="thd", **packed_arguments())


def test_hybrid_without_its_groups_is_refused():
    with pytest.raises(ConfigError, match="--hierarchical-context-parallel-sizes"):
        module(cp_comm_type="a2a+p2p", cp_global_ranks=[0, 1])


def packed_arguments():
    cu_seqlens = torch.tensor([0, 3, 7])
    return {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask_type": "triangle"}, "triangle"),
        ({"attn_mask_type": "padding"}, "cu_seqlens"),
        ({"attn_mask_type": "arbitrary"}, "attention_mask"),
        ({"qkv_format": "hsbd"}, "hsbd"),
        ({"qkv_format": "thd"}, "cu_seqlens"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        module()(*qkv(), **options)
