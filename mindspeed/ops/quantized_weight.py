"""Frozen weights in 4 or 8 bits: quantise, dequantise, multiply.

    format  codes                          scales                     a weight w of a block is
    nf4     uint8 [out, in / 2]            fp32 [out, in / 64]        NF4[code] * scale
    int8    int8  [out, in]                fp32 [out, 1]              code * scale / 127
    fp8     uint8 [out, in], E4M3's bits   fp32 [out/128, in/128]     E4M3(code) * scale

A scale is the largest magnitude of its block; for fp8 that over 448, as published checkpoints have
it (``weight_scale_inv``). nf4 has the code book, the blocks of 64 along a row and the order of bits
of bitsandbytes (two weights a byte, the first one in the high half); int8 is that package's, too,
with a scale per row (LLM.int8 without outliers). Sources: Dettmers et al., "QLoRA" (2023), and
"LLM.int8()" (2022); DeepSeek-V3's technical report.

**Double quantisation** of nf4's scales: less their mean, in blocks of 256, in the 8-bit code book
of dynamic exponents ("8-bit Optimizers via Block-wise Quantization", 2022). 4.127 bits a weight.

Weights are dequantised in fp32 and rounded once, to the dtype that they multiply in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops._check import FLOATS, ArgumentCheck
from mindspeed.ops._numerics import accumulation_dtype, random
from mindspeed.ops.registry import Operator, plain_torch, torch_npu, triton

__all__ = [
    "dequantize_scales",
    "dequantize_weight",
    "quantize_scales",
    "quantize_weight",
    "quantized_matmul",
]

FORMATS = ("nf4", "int8", "fp8")
BLOCK = 64
"""Weights of a row that share a scale of nf4."""
SCALES_BLOCK = 256
"""Scales that share a scale of double quantisation."""
FP8_BLOCK = 128
"""Rows, and columns, of a block of fp8."""
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of the normal distribution, scaled to [-1, 1]; 0 is one of them."""
_E4M3 = torch.float8_e4m3fn
_TOP = torch.finfo(_E4M3).max


def quantize_weight(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight.

    Args:
        weight: ``[out, in]``, fp32, bf16 or fp16; ``in`` is a multiple of 64 for nf4.
        form: ``nf4``, ``int8`` or ``fp8``.

    Returns:
        Codes and fp32 scales, see the module.

    Raises:
        OperatorError: wrong dtype or size, or another format.
    """
    check = ArgumentCheck("quantize_weight")
    check.dtype(FLOATS, weight=weight)
    check.rank(2, weight=weight)
    check.choice(FORMATS, form=form)
    fits = form != "nf4" or weight.shape[1] % BLOCK == 0
    check.require(fits, "weight", f"a multiple of {BLOCK} columns", weight.shape[1])
    return QUANTIZE_WEIGHT(weight, form)  # type: ignore[no-any-return]


def dequantize_weight(codes: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """The weight ``[out, in]`` in ``dtype`` (fp32, bf16 or fp16).

    Args:
        codes: of :func:`quantize_weight`.
        scales: of :func:`quantize_weight`, fp32.
        form: ``nf4``, ``int8`` or ``fp8``.

    Raises:
        OperatorError: tensors that do not belong together, or another format.
    """
    _check_pair(ArgumentCheck("dequantize_weight"), codes, scales, form)
    return DEQUANTIZE_WEIGHT(codes, scales, form, dtype)  # type: ignore[no-any-return]


def quantized_matmul(
    x: Tensor, codes: Tensor, scales: Tensor, form: str, *, transposed: bool = True
) -> Tensor:
    """``x W^T``, or ``x W`` with ``transposed=False``; not differentiable.

    Args:
        x: ``[..., in]`` (or ``[..., out]``), fp32, bf16 or fp16.
        codes: of :func:`quantize_weight`.
        scales: of :func:`quantize_weight`, fp32.
        form: ``nf4``, ``int8`` or ``fp8``.

    Returns:
        ``[..., out]`` (or ``[..., in]``) in the dtype of x, in which the weight is multiplied.

    Raises:
        OperatorError: tensors that do not belong together, or another format.
    """
    check = ArgumentCheck("quantized_matmul")
    check.dtype(FLOATS, x=x)
    _check_pair(check, codes, scales, form)
    check.same("device", x=x, codes=codes)
    rows, columns = _shape(codes, form)
    inner = columns if transposed else rows
    check.require(x.shape[-1] == inner, "x", f"a last dimension of {inner}", x.shape)
    flat = QUANTIZED_MATMUL(x.reshape(-1, inner), codes, scales, form, transposed)
    return flat.view(*x.shape[:-1], flat.shape[-1])  # type: ignore[no-any-return]


def quantize_scales(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Double quantisation: codes of scales, their scales, and the mean.

    Args:
        scales: of nf4, fp32 ``[out, in / 64]``.

    Returns:
        uint8 ``[out, in / 64]``, fp32 ``[ceil(n / 256)]`` for n scales, and fp32 ``[1]``.
    """
    mean = scales.mean()
    flat = F.pad((scales - mean).flatten(), (0, -scales.numel() % SCALES_BLOCK))
    blocks = flat.view(-1, SCALES_BLOCK)
    top = blocks.abs().amax(1, keepdim=True)
    book = dynamic_code(scales.device)
    scaled = (blocks * (1.0 / top.clamp(min=1e-38))).clamp_(-1, 1)
    codes = torch.bucketize(scaled, (book[:-1] + book[1:]) / 2).to(torch.uint8)
    codes = codes.flatten()[: scales.numel()].view(scales.shape)
    return codes, top.flatten(), mean.view(1)


def dequantize_scales(codes: Tensor, top: Tensor, mean: Tensor) -> Tensor:
    """The scales, fp32 ``[out, in / 64]``, of what :func:`quantize_scales` returned."""
    return DEQUANTIZE_SCALES(codes, top, mean)  # type: ignore[no-any-return]


def _dequantize_scales(codes: Tensor, top: Tensor, mean: Tensor) -> Tensor:
    blocks = dynamic_code(codes.device).to(top.dtype)[codes.flatten().int()]
    blocks *= top.repeat_interleave(SCALES_BLOCK)[: blocks.numel()]
    return blocks.view(codes.shape) + mean


def _dynamic_numbers() -> tuple[float, ...]:
    """Exponent 10**(i - 6) has 2**i numbers of each sign, equally apart; and there are 0 and 1."""
    numbers = [0.0, 1.0]
    for i in range(7):
        ends = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        means = (10.0 ** (i - 6) * ((ends[:-1] + ends[1:]) / 2)).tolist()
        numbers += [sign * value for sign in (1, -1) for value in means]
    return tuple(sorted(numbers))


_DYNAMIC = _dynamic_numbers()  # here: planning has no values of tensors


def dynamic_code(device: torch.device | str) -> Tensor:
    """The 256 numbers of the 8-bit format with a dynamic exponent, sorted: fp32 ``[256]``."""
    return torch.tensor(_DYNAMIC, dtype=torch.float32, device=device)


def _shape(codes: Tensor, form: str) -> tuple[int, int]:
    """Rows and columns of the weight."""
    rows, columns = codes.shape
    return rows, 2 * columns if form == "nf4" else columns


def scales_shape(rows: int, columns: int, form: str) -> tuple[int, int]:
    """Shape of the scales of a weight ``[rows, columns]``."""
    if form == "nf4":
        return rows, columns // BLOCK
    return (rows, 1) if form == "int8" else (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))


def _check_pair(check: ArgumentCheck, codes: Tensor, scales: Tensor, form: str) -> None:
    check.choice(FORMATS, form=form)
    check.rank(2, codes=codes)
    check.dtype((torch.int8 if form == "int8" else torch.uint8,), codes=codes)
    check.dtype((torch.float32,), scales=scales)
    check.shape(scales_shape(*_shape(codes, form), form), scales=scales)
    check.same("device", codes=codes, scales=scales)


@functools.cache
def _pairs(device: str) -> Tensor:
    """The two fp32 numbers of each byte of nf4 as one word, int64 ``[256]``.

    One look-up of a word is several times faster than one of two numbers.
    """
    book = torch.tensor(NF4, dtype=torch.float32, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((book[byte >> 4], book[byte & 15]), 1).view(torch.int64).squeeze(1)


@functools.cache
def _e4m3_numbers(dtype: torch.dtype, device: str) -> Tensor:
    """The number of each byte of fp8, ``[256]``; torch converts one by one on the CPU."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(_E4M3).to(dtype)


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    """The entry of each code, flat."""
    return table.index_select(0, codes.reshape(-1).int())


def _quantize(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    w = weight.float()
    rows, columns = w.shape
    if form == "int8":
        top = w.abs().amax(1, keepdim=True)
        return torch.round(w * (127.0 / top).nan_to_num(posinf=0.0)).to(torch.int8), top
    if form == "fp8":
        padded = F.pad(w, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
        blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
        scales = blocks.abs().amax((1, 3)) / _TOP
        scaled = w / _widened(scales, rows, columns).clamp(min=torch.finfo(torch.float32).tiny)
        return scaled.clamp_(-_TOP, _TOP).to(_E4M3).view(torch.uint8), scales
    blocks = w.reshape(rows, columns // BLOCK, BLOCK)
    top = blocks.abs().amax(2, keepdim=True)
    scaled = (blocks * (1.0 / top.clamp(min=1e-38))).clamp_(-1, 1)
    book = torch.tensor(NF4, dtype=torch.float32, device=w.device)
    codes = torch.bucketize(scaled, (book[:-1] + book[1:]) / 2).to(torch.uint8)
    codes = codes.view(rows, columns // 2, 2)
    return (codes[..., 0] << 4) | codes[..., 1], top.squeeze(2)


def _widened(scales: Tensor, rows: int, columns: int) -> Tensor:
    """The scale of each weight of fp8 blocks, ``[rows, columns]``."""
    wide = scales.repeat_interleave(FP8_BLOCK, 0)[:rows]
    return wide.repeat_interleave(FP8_BLOCK, 1)[:, :columns]


def _dequantize(codes: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    rows, columns = _shape(codes, form)
    if form == "int8":
        return (codes * scales).mul_(1 / 127).to(dtype)
    if form == "fp8":
        numbers = _looked_up(_e4m3_numbers(scales.dtype, str(codes.device)), codes)
        return numbers.view(rows, columns).mul_(_widened(scales, rows, columns)).to(dtype)
    numbers = _looked_up(_pairs(str(codes.device)), codes).view(torch.float32)
    blocks = numbers.view(rows, columns // BLOCK, BLOCK)
    return (blocks * scales.unsqueeze(2)).view(rows, columns).to(dtype)


def _multiply(x: Tensor, codes: Tensor, scales: Tensor, form: str, transposed: bool) -> Tensor:
    wide = accumulation_dtype(x)
    weight = _dequantize(codes, scales, form, x.dtype).to(wide)
    return (x.to(wide) @ (weight.t() if transposed else weight)).to(x.dtype)


def _by_dequantizing(
    x: Tensor, codes: Tensor, scales: Tensor, form: str, transposed: bool
) -> Tensor:
    """The product of torch, with the weight in memory for a moment."""
    weight = DEQUANTIZE_WEIGHT(codes, scales, form, x.dtype)
    return x @ (weight.t() if transposed else weight)


def _npu(x: Tensor, codes: Tensor, scales: Tensor, form: str, transposed: bool) -> Tensor:
    if form != "int8" or not transposed or x.dtype == torch.float32:
        return _by_dequantizing(x, codes, scales, form, transposed)
    antiquant = (scales / 127).to(x.dtype).view(1, -1)
    return torch.ops.npu.npu_weight_quant_batchmatmul(x, codes.t(), antiquant)


def _fake_quantize(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    width = columns // 2 if form == "nf4" else columns
    codes = weight.new_empty(rows, width, dtype=torch.int8 if form == "int8" else torch.uint8)
    return codes, weight.new_empty(scales_shape(rows, columns, form), dtype=torch.float32)


def _fake_dequantize(codes: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(_shape(codes, form), dtype=dtype)


def _fake_multiply(x: Tensor, codes: Tensor, scales: Tensor, form: str, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], _shape(codes, form)[0 if transposed else 1])


def _weights(seed: int) -> Iterator[tuple[Tensor, str]]:
    """Weights that are numbers of their format, so that no rounding is close to a tie."""
    for form, (rows, columns) in (
        ("nf4", (5, 192)),
        ("int8", (7, 33)),
        ("fp8", (130, 257)),
        ("nf4", (1, 64)),
    ):
        weight = random((rows, columns), torch.float32, seed=seed)
        codes, scales = _quantize(weight, form)
        powers = torch.exp2(scales.log2().round())
        yield _dequantize(codes, powers, form, torch.float32), form


def _samples_quantize(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for weight, form in _weights(0):
        yield weight.to(dtype), form


def _samples_dequantize(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for weight, form in _weights(1):
        yield *_quantize(weight, form), form, dtype


def _samples_scales(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((5, 3), (7, 80)):
        yield quantize_scales(random(shape, torch.float32).abs())


def _samples_multiply(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for weight, form in _weights(2):
        pair = _quantize(weight, form)
        for transposed in (True, False):
            inner = weight.shape[1] if transposed else weight.shape[0]
            yield random((6, inner), dtype, seed=3), *pair, form, transposed


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    codes = torch.zeros(hidden, hidden // 2, dtype=torch.uint8, device=device)
    scales = torch.ones(scales_shape(hidden, hidden, "nf4"), device=device)
    return codes, scales, "nf4", dtype


def _flops(x: Any, codes: Any, scales: Any, form: str, transposed: bool, **more: Any) -> int:
    columns = codes[1] * (2 if form == "nf4" else 1)
    return 2 * int(x[0]) * int(codes[0]) * columns


QUANTIZE_WEIGHT = Operator(
    "quantize_weight(Tensor weight, str form) -> (Tensor, Tensor)",
    reference=_quantize,
    fake=_fake_quantize,
    samples=_samples_quantize,
    public="mindspeed.ops.quantized_weight.quantize_weight",
)

DEQUANTIZE_WEIGHT = Operator(
    "dequantize_weight(Tensor codes, Tensor scales, str form, ScalarType dtype) -> Tensor",
    reference=_dequantize,
    fake=_fake_dequantize,
    cuda=[triton("quantized_weight:dequantize")],
    samples=_samples_dequantize,
    workload=_workload,
    public="mindspeed.ops.quantized_weight.dequantize_weight",
)

DEQUANTIZE_SCALES = Operator(
    "dequantize_scales(Tensor codes, Tensor top, Tensor mean) -> Tensor",
    reference=_dequantize_scales,
    fake=lambda codes, top, mean: top.new_empty(codes.shape),
    cuda=[plain_torch(_dequantize_scales)],
    npu=[plain_torch(_dequantize_scales)],
    samples=_samples_scales,
    dtypes=(torch.float32,),
    public="mindspeed.ops.quantized_weight.dequantize_scales",
)

QUANTIZED_MATMUL = Operator(
    "quantized_matmul(Tensor x, Tensor codes, Tensor scales, str form, bool transposed) -> Tensor",
    reference=_multiply,
    fake=_fake_multiply,
    cpu=[plain_torch(_by_dequantizing)],
    cuda=[plain_torch(_by_dequantizing)],
    npu=[
        torch_npu(
            _npu,
            "npu_weight_quant_batchmatmul",
            note="its kernel multiplies int8 in 16 bits; else the weight is dequantised before",
        )
    ],
    flops=_flops,
    samples=_samples_multiply,
    public="mindspeed.ops.quantized_weight.quantized_matmul",
)
