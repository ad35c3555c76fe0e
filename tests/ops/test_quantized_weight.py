"""Frozen weights in 4 and 8 bits: bitsandbytes' numbers, bits per weight, products."""

from __future__ import annotations

import pytest
import torch

from mindspeed.ops import quantized_weight as ops
from tests.support.lazy import Lazy

bitsandbytes = Lazy("bitsandbytes.functional")


def weight(rows, columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    return (0.02 * torch.randn(rows, columns, generator=generator)).to(dtype)


def nearest(values, book):
    """Indices of the nearest numbers, by distance."""
    return (values.double()[..., None] - book.double()).abs().argmin(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_has_the_published_code_book_and_blocks(dtype):
    w = weight(6, 192, dtype)
    codes, scales = ops.quantize_weight(w, "nf4")
    blocks = w.float().view(-1, 64)
    top = blocks.abs().amax(1, keepdim=True)
    assert torch.equal(scales.flatten(), top.flatten())
    index = nearest(blocks / top, torch.tensor(ops.NF4)).view(6, -1, 2)
    assert torch.equal(codes, (16 * index[..., 0] + index[..., 1]).to(torch.uint8))
    found = ops.dequantize_weight(codes, scales, "nf4", dtype)
    assert torch.equal(
        found, (torch.tensor(ops.NF4)[index].view(-1, 64) * top).view(6, 192).to(dtype)
    )


def test_the_code_books_are_quantiles_and_dynamic_exponents():
    """By the formula of the paper, and bitsandbytes' 8-bit numbers by their construction."""
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = 0.9677083
    above = normal.icdf(torch.linspace(offset, 0.5, 9)[:-1])
    below = -normal.icdf(torch.linspace(offset, 0.5, 8)[:-1])
    book = torch.cat([above, torch.zeros(1), below]).sort().values
    torch.testing.assert_close(torch.tensor(ops.NF4), book / book.max(), rtol=0, atol=1e-6)
    dynamic = ops.dynamic_code("cpu")
    assert len(dynamic.unique()) == 256 and dynamic.max() == 1 and 0 in dynamic
    assert dynamic.min() == pytest.approx(-0.9929688)
    assert sorted(-dynamic[dynamic < 0].double().numpy()) == pytest.approx(
        sorted(dynamic[(dynamic > 0) & (dynamic < 1)].double().numpy())
    )


def test_double_quantisation_needs_4_127_bits():
    w = weight(256, 1024)
    codes, scales = ops.quantize_weight(w, "nf4")
    small, top, mean = ops.quantize_scales(scales)
    bits = 8 * (codes.nbytes + small.nbytes + top.nbytes) / w.numel()
    assert bits == 4 + 8 / 64 + 32 / (64 * 256) and round(bits, 3) == 4.127
    assert mean.nbytes == 4
    blocks = (scales - mean).view(-1, 256)
    assert torch.equal(top, blocks.abs().amax(1))
    book = ops.dynamic_code("cpu")
    assert (nearest(blocks / top[:, None], book) == small.view(-1, 256)).double().mean() > 0.999
    again = ops.dequantize_scales(small, top, mean)
    torch.testing.assert_close(again, scales, rtol=0.02, atol=0)


@pytest.mark.parametrize("shape", [(24, 64), (7, 128), (300, 448)])
def test_nf4_equals_bitsandbytes(shape):
    pytest.importorskip("bitsandbytes")
    w = weight(*shape)
    for double in (False, True):
        theirs, state = bitsandbytes.quantize_4bit(w, quant_type="nf4", compress_statistics=double)
        codes, scales = ops.quantize_weight(w, "nf4")
        assert torch.equal(codes.flatten(), theirs.flatten())
        if double:
            small, top, mean = ops.quantize_scales(scales)
            away = (small.flatten().int() - state.absmax.int()).abs()
            assert away.max() <= 1 and away.double().mean() < 0.005  # its division is not exact
            small = state.absmax.view(small.shape)
            assert torch.equal(top, state.state2.absmax) and mean == state.offset
            assert torch.equal(ops.dynamic_code("cpu"), state.state2.code)
            scales = ops.dequantize_scales(small, top, mean)
        else:
            assert torch.equal(scales.flatten(), state.absmax)
        expected = bitsandbytes.dequantize_4bit(theirs, state)
        assert torch.equal(ops.dequantize_weight(codes, scales, "nf4", torch.float32), expected)


def test_int8_equals_bitsandbytes():
    pytest.importorskip("bitsandbytes")
    w = weight(9, 70)
    theirs, stats, _ = bitsandbytes.int8_vectorwise_quant(w)
    codes, scales = ops.quantize_weight(w, "int8")
    assert torch.equal(codes, theirs) and torch.equal(scales.flatten(), stats)
    expected = bitsandbytes.int8_vectorwise_dequant(theirs, stats)
    found = ops.dequantize_weight(codes, scales, "int8", torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_int8_has_a_scale_per_row():
    w = weight(9, 70)
    codes, scales = ops.quantize_weight(w, "int8")
    assert torch.equal(scales[:, 0], w.abs().amax(1)) and codes.abs().amax(1).eq(127).all()
    found = ops.dequantize_weight(codes, scales, "int8", torch.float32)
    assert ((found - w).abs() <= scales / 254 * 1.001).all()


def test_fp8_has_the_blocks_of_published_checkpoints():
    w = weight(130, 300)
    codes, scales = ops.quantize_weight(w, "fp8")
    assert scales.shape == (2, 3)
    found = ops.dequantize_weight(codes, scales, "fp8", torch.float32)
    for row in range(2):
        for column in range(3):
            block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scale = w[block].abs().max() / 448
            torch.testing.assert_close(scales[row, column], scale)
            rounded = (w[block] / scale).to(torch.float8_e4m3fn)
            assert torch.equal(codes[block].view(torch.float8_e4m3fn).float(), rounded.float())
            torch.testing.assert_close(found[block], rounded.float() * scale)


@pytest.mark.parametrize("form", ops.FORMATS)
def test_rows_of_zeros_stay_zeros(form):
    w = weight(3, 128)
    w[1] = 0
    codes, scales = ops.quantize_weight(w, form)
    found = ops.dequantize_weight(codes, scales, form, torch.bfloat16)
    assert found.isfinite().all() and not found[1].any()


@pytest.mark.parametrize("form", ops.FORMATS)
@pytest.mark.parametrize("transposed", [True, False])
def test_products_are_those_of_the_dequantised_weight(form, transposed):
    w, x = weight(96, 128), weight(10, 128 if transposed else 96).view(2, 5, -1)
    codes, scales = ops.quantize_weight(w, form)
    dense = ops.dequantize_weight(codes, scales, form, torch.float32)
    found = ops.quantized_matmul(x, codes, scales, form, transposed=transposed)
    assert torch.equal(found, x @ (dense.t() if transposed else dense))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.quantize_weight(weight(4, 96), "nf4"), "a multiple of 64 columns"),
        (lambda: ops.quantize_weight(weight(4, 64), "nf5"), "nf5"),
        (lambda: ops.quantize_weight(weight(4, 64)[0], "nf4"), "weight"),
        (
            lambda: ops.dequantize_weight(
                *ops.quantize_weight(weight(4, 64), "int8"), "nf4", torch.float32
            ),
            "codes",
        ),
        (
            lambda: ops.quantized_matmul(
                weight(2, 32), *ops.quantize_weight(weight(4, 64), "nf4"), "nf4"
            ),
            "a last dimension of 64",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(Exception, match=message):
        call()
