"""Slopes and biases of ALiBi, and attention with them against the formula and Hugging Face."""

from __future__ import annotations

import pytest
import torch

from mindspeed.attention.alibi import alibi_bias, alibi_slopes
from mindspeed.te import attention, flash
from mindspeed.te.attention import Documents
from mindspeed.te.masks import visibility
from tests.support import truth


def test_slopes():
    eight = [2**-k for k in range(1, 9)]
    assert alibi_slopes(8) == eight
    assert alibi_slopes(16) == pytest.approx([2 ** (-k / 2) for k in range(1, 17)], rel=1e-15)
    between = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert alibi_slopes(12) == pytest.approx(eight + between, rel=1e-15)
    assert alibi_slopes(1) == [2**-8]


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 40])
def test_slopes_of_hugging_face(heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    bias = bloom.build_alibi_tensor(torch.ones(1, 9), heads, torch.float32).view(heads, 1, 9)
    ours = alibi_bias(torch.tensor(alibi_slopes(heads)), 9, 9)[0]
    below = torch.ones(9, 9).tril().bool()
    difference = (bias - ours)[:, below]  # slope * j there: another constant for each row
    rows = (bias - ours).masked_fill(~below, float("-inf")).amax(-1, keepdim=True)
    torch.testing.assert_close(difference, rows.expand(heads, 9, 9)[:, below], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernels", [attention, flash], ids=["formula", "flash"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_attention_with_slopes(kernels, packed):
    *qkv, dout = truth.tensors(21, heads=6)
    slopes = torch.tensor(alibi_slopes(6), dtype=torch.float32)
    cu = torch.tensor([0, 8, 9, 21])
    keep = torch.ones(21, 21).tril().bool()
    leaves = [x.clone().requires_grad_() for x in qkv]
    if packed:
        document = torch.bucketize(torch.arange(21), cu[1:], right=True)
        keep &= document[:, None] == document
        out = kernels.attend_packed(
            *leaves, Documents(cu, cu), "causal", scale=0.3, slopes=slopes
        ).view(21, 6, -1)
    else:
        batch = [x.transpose(0, 1)[None] for x in leaves]
        seen = visibility("causal", 21, 21)
        out = kernels.attend(*batch, seen, scale=0.3, slopes=slopes)[0].transpose(0, 1)
    out.backward(dout)
    expected = truth.attend(*qkv, dout, keep, scale=0.3, slopes=slopes.double())
    for got, wanted in zip((out, *(x.grad for x in leaves)), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_a_query_with_cached_keys_is_at_the_position_of_the_last():
    *qkv, dout = truth.tensors(9, heads=4)
    slopes = torch.tensor(alibi_slopes(4))
    q, k, v = (x.transpose(0, 1)[None] for x in qkv)
    keep = torch.ones(9, 9).tril().bool()
    expected = truth.attend(*qkv, dout, keep, scale=0.3, slopes=slopes.double())[0][-2:]
    for kernels in (attention, flash):
        seen = visibility("causal_bottom_right", 2, 9)
        out = kernels.attend(q[:, :, -2:], k, v, seen, scale=0.3, slopes=slopes)
        torch.testing.assert_close(out[0].transpose(0, 1), expected, rtol=0, atol=1e-6)


def test_only_slopes_are_saved_of_the_alibi_bias():
    """``4 n`` bytes where a bias tensor has ``n s s e``."""
    from mindspeed.instruments.saved import saved_for_backward

    heads, size = 4, 512
    slopes = torch.tensor(alibi_slopes(heads))
    q, k, v = (torch.randn(1, heads, size, 8, requires_grad=True) for _ in range(3))
    kept = {}
    for name, options in (("without", {}), ("slopes", {"slopes": slopes})):
        with saved_for_backward() as saved:
            flash.attend(q, k, v, visibility("causal", size, size), scale=0.3, **options)
        kept[name] = saved.bytes
    assert kept["slopes"] - kept["without"] == 4 * heads
    bias = alibi_bias(slopes, size, size)
    assert bias.numel() * bias.element_size() == 4 * heads * size * size
