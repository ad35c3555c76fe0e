"""Causal convolution: each document alone, by torch's own convolution in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from mindspeed.ops import OperatorError
from mindspeed.ops.causal_conv1d import causal_conv1d


def alone(x, weight, bias, silu, ends):
    """Document by document, ``[1, t, c]``."""
    taps, channels = weight.shape[1], len(weight)
    parts = [x[:, start:end].transpose(1, 2) for start, end in itertools.pairwise(ends)]
    found = [
        F.conv1d(F.pad(part, (taps - 1, 0)), weight[:, None], bias, groups=channels)
        for part in parts
    ]
    out = torch.cat(found, 2).transpose(1, 2)
    return F.silu(out) if silu else out


@pytest.mark.parametrize("ends", [[0, 1, 2, 9, 16], [0, 16], [0, 3, 16], [0, 1]], ids=str)
@pytest.mark.parametrize("taps", [1, 4, 20])
@pytest.mark.parametrize("silu", [False, True])
def test_each_document_is_convolved_alone(taps, ends, silu):
    generator = torch.Generator().manual_seed(taps)
    options = {"generator": generator, "dtype": torch.float64}
    shapes = (1, ends[-1], 6), (6, taps), (6,)
    inputs = [torch.randn(shape, **options) for shape in shapes]
    results = []
    for function in (
        lambda *given: causal_conv1d(*given, silu=silu, cu_seqlens=torch.tensor(ends)),
        lambda *given: alone(*given, silu, ends),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = function(*leaves)
        out.sin().sum().backward()
        results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_whole_samples_are_one_document_each():
    x, weight = torch.randn(3, 7, 2), torch.randn(2, 4)
    packed = causal_conv1d(x.reshape(1, 21, 2), weight, cu_seqlens=[0, 7, 14, 21])
    assert torch.equal(causal_conv1d(x, weight), packed.view(3, 7, 2))
    assert causal_conv1d(x[:, :0], weight).shape == (3, 0, 2)


def test_what_does_not_fit_is_refused():
    x = torch.randn(1, 5, 2)
    with pytest.raises(OperatorError, match=r"weight: expected shape \(2, taps\), got \(3, 4\)"):
        causal_conv1d(x, torch.randn(3, 4))
    with pytest.raises(OperatorError, match="from 0 to 5, got"):
        causal_conv1d(x, torch.randn(2, 4), cu_seqlens=[0, 3, 2, 5])
