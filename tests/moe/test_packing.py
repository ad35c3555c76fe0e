"""Probabilities in the rows of tokens arrive bit for bit, and so do both gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed.moe.collectives import sum_in_fp32
from mindspeed.moe.packing import Packing

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# Bits that are no ordinary number: as halves of bf16 most are NaN or denormal.
ODD = [float("nan"), float("inf"), -0.0, 1e-45, 1.0 + 2**-23, 0.1, torch.finfo(torch.float32).max]


@pytest.mark.parametrize(("rows", "probs"), list(itertools.product(FLOATS, FLOATS)))
def test_both_passes_are_exact(rows, probs):
    x = torch.randn(len(ODD), 5, dtype=rows, requires_grad=True)
    p = torch.tensor(ODD).to(probs).requires_grad_()
    packing = Packing.of(x, p)
    packed = packing.pack(packing.widen(x), p)
    assert packed.shape == (len(ODD), packing.columns)
    assert packed.shape[1] * rows.itemsize % 16 == 0
    y, q = packing.unpack(packed)
    assert y.equal(x)
    same(q, p, rows)
    dy, dq = torch.randn_like(y), torch.tensor(ODD[::-1]).to(probs)
    torch.autograd.backward([y, q], [dy, dq])
    assert x.grad.equal(dy)
    same(p.grad, dq, rows)


def test_packed_gradients_are_summed_apart():
    packing = Packing(3, torch.bfloat16, torch.float32)
    rows, probs = torch.randn(2, 4, 3).bfloat16(), torch.randn(2, 4)
    parts = [packing.widen(x) for x in rows]
    for part, p in zip(parts, probs, strict=True):
        packing.write(part, p)
    total, total_probs = packing.unpack(packing.add(torch.stack(parts)))
    assert total.equal(sum_in_fp32(rows))
    assert total_probs.equal(probs.sum(0))


def test_no_rows():
    packing = Packing(6, torch.bfloat16, torch.float32)
    packed = packing.pack(packing.widen(torch.empty(0, 6).bfloat16()), torch.empty(0))
    assert [x.shape for x in packing.unpack(packed)] == [(0, 6), (0,)]


def same(actual: torch.Tensor, expected: torch.Tensor, rows: torch.dtype) -> None:
    """Equal to the bit; where probabilities are the smaller dtype, a NaN may be another NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    if expected.itemsize >= rows.itemsize:
        bits = [x.detach().contiguous().view(torch.uint8) for x in (actual, expected)]
        assert bits[0].equal(bits[1])
