"""Grouped products of int8 matrices: ``npu_quant_gmm`` (cumulative sizes) and ``_v2`` (sizes).

    y[g] = act((x[g] @ w[g] + bias[g]) * scale[g] * per_token_scale)

Sums of products are exact in int32 on every processor. Forward only. Source: the A8W8 form of
torch_npu's ``npu_grouped_matmul``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._check import FLOATS, ArgumentCheck, public
from mindspeed.ops._numerics import WORKLOAD_ROWS, product_flops, random
from mindspeed.ops.compat._activations import BY_CODE
from mindspeed.ops.grouped_matmul import cumulative, npu_grouped_matmul, sample_ends
from mindspeed.ops.registry import Operator, torch_npu

__all__ = ["npu_quant_gmm", "npu_quant_gmm_v2"]

_OUTPUTS = (torch.float16, torch.bfloat16, torch.int8)


def _quant_gmm(
    check: ArgumentCheck,
    sizes: bool,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    per_token_scale: Tensor | None = None,
    bias: Tensor | None = None,
    group_list: Tensor | Sequence[int] | None = None,
    output_dtype: torch.dtype | None = None,
    act_type: int = 0,
) -> Tensor:
    """Multiply each group of int8 rows with its own int8 matrix and scale the result.

    Args:
        x: ``[T, K]`` int8, rows sorted by group.
        weight: ``[E, K, N]`` int8.
        scale: ``[E, N]``: fp32, bf16, or int64 with the bits of an fp32 number in its low half.
        offset: only None, as in torch_npu.
        per_token_scale: ``[T]`` fp32; not with an int8 output.
        bias: ``[E, N]`` int32.
        group_list: row after the last of each group, int64 tensor ``[E]`` or list; of ``_v2``
            the rows of each group, a tensor.
        output_dtype: fp16 (default), bf16, or int8, which needs an int64 scale.
        act_type: 0 none, 1 relu, 2 gelu (tanh), 4 fast gelu, 5 silu.

    Returns:
        ``[T, N]`` in ``output_dtype``; int8 is rounded and clamped.

    Raises:
        OperatorError: wrong dtype, shape, act_type or group_list.
    """
    if sizes and group_list is not None:
        check.tensor(group_list=group_list)
    check.dtype((torch.int8,), x=x, weight=weight)
    check.rank(2, x=x)
    check.rank(3, weight=weight)
    ends = cumulative(check, "group_list", group_list, x, sizes=sizes)
    check.shape((ends.shape[0], x.shape[1], weight.shape[2]), weight=weight)
    columns = (ends.shape[0], weight.shape[2])
    check.tensor(scale=scale)
    check.dtype((torch.int64, torch.bfloat16, torch.float32), scale=scale)
    check.shape(columns, scale=scale)
    check.require(offset is None, "offset", "None", offset)
    if bias is not None:
        check.dtype((torch.int32,), bias=bias)
        check.shape(columns, bias=bias)
    dtype = output_dtype or torch.float16
    check.choice(_OUTPUTS, output_dtype=dtype)
    check.choice(tuple(BY_CODE), act_type=act_type)
    if per_token_scale is not None:
        check.dtype(FLOATS[:1], per_token_scale=per_token_scale)
        check.shape(x.shape[:1], per_token_scale=per_token_scale)
    if dtype == torch.int8:
        check.require(scale.dtype == torch.int64, "scale", "int64 for an int8 output", scale.dtype)
        check.require(
            per_token_scale is None, "per_token_scale", "None for an int8 output", per_token_scale
        )
    given = {"weight": weight, "scale": scale, "bias": bias, "per_token_scale": per_token_scale}
    check.same("device", x=x, **given)
    return QUANT_GROUPED_MATMUL(  # type: ignore[no-any-return]
        x, weight, scale, bias, per_token_scale, ends, act_type, dtype
    )


npu_quant_gmm = public("npu_quant_gmm", _quant_gmm, False)
npu_quant_gmm_v2 = public("npu_quant_gmm_v2", _quant_gmm, True)


def unpacked_scale(scale: Tensor) -> Tensor:
    """Values of a scale, elementwise, fp32 or wider; int64 holds the bits of fp32 values."""
    if scale.dtype == torch.int64:
        return scale.to(torch.int32).view(torch.float32)
    return scale.to(torch.promote_types(scale.dtype, torch.float32))


def _reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    per_token_scale: Tensor | None,
    ends: Tensor,
    act_type: int,
    output_dtype: torch.dtype,
) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[2], dtype=output_dtype)
    scale, start = unpacked_scale(scale), 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            total = int_product(x[start:end], weight[group])
            if bias is not None:
                total = total + bias[group]
            y = total.to(scale.dtype) * scale[group]
            if per_token_scale is not None:
                y = y * per_token_scale[start:end, None]
            y = BY_CODE[act_type](y)
            out[start:end] = y.round().clamp_(-128, 127) if output_dtype == torch.int8 else y
        start = end
    return out


def int_product(x: Tensor, w: Tensor) -> Tensor:
    """``x @ w`` of int8 matrices ``[m, k]`` and ``[k, n]``, exact, as int32 ``[m, n]``."""
    if x.device.type == "cpu" and _library_is_exact():
        return torch._int_mm(x, w.contiguous())
    # Integer products of other devices are picky about sizes; 2^53 holds any sum of int8 products.
    return (x.double() @ w.double()).to(torch.int32)


@functools.cache
def _library_is_exact() -> bool:
    """Whether torch's int8 product is exact on this processor.

    Without VNNI instructions oneDNN adds pairs of products in saturating 16-bit numbers. Extreme
    values show it, of each sign, in matrices and vectors, in whole registers and their rests.
    """
    for m, k, n in ((1, 64, 32), (16, 64, 1), (16, 67, 32), (5, 2, 3)):
        for left in (-128, 127):
            for right in (-128, 127):
                x = torch.full((m, k), left, dtype=torch.int8)
                w = torch.full((k, n), right, dtype=torch.int8)
                if not bool((torch._int_mm(x, w) == left * right * k).all()):
                    return False
    return True


_CODES = {torch.float16: 5, torch.bfloat16: 15}
"""Numbers of dtypes in torch_npu's ``output_dtype``."""


def _npu(*operands: Any) -> Tensor:
    x, weight, scale, bias, per_token_scale, ends, act_type, output_dtype = operands
    if not x.shape[0] or output_dtype == torch.int8:
        # torch_npu's meta kernel refuses int8, and its default is not documented.
        return _reference(*operands)
    return npu_grouped_matmul(
        [x],
        [weight],
        bias=None if bias is None else [bias],
        scale=[scale],
        per_token_scale=None if per_token_scale is None else [per_token_scale],
        group_list=ends,
        group_type=0,
        act_type=act_type,
        output_dtype=_CODES[output_dtype],
    )


def _fake(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2], dtype=rest[-1])


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-128, 128, shape, generator=generator)  # noqa: E731
    for sizes, inner, outer, act in (((3, 0, 5), 8, 16, 0), ((7, 4), 33, 5, 5), ((0,), 4, 8, 1)):
        x, w = draw(sum(sizes), inner).to(torch.int8), draw(len(sizes), inner, outer).to(torch.int8)
        scale = random((len(sizes), outer), torch.float32, seed=1).abs() / 1000
        bias = draw(len(sizes), outer).to(torch.int32)
        per_token = random((sum(sizes),), torch.float32, seed=2).abs()
        yield x, w, scale, None, None, sample_ends(sizes), act, dtype
        yield x, w, scale, bias, per_token, sample_ends(sizes), act, dtype
        packed = scale.view(torch.int32).to(torch.int64)
        yield x, w, packed, bias, None, sample_ends(sizes), act, torch.int8


def int8_workload(hidden: int, device: str) -> tuple[Tensor, ...]:
    """Operands of a benchmark with eight experts.

    x int8 ``[T, H]``, weights int8 ``[8, H, 1024]``, scales fp32 ``[8, 1024]`` and cumulative group
    sizes int64 ``[8]``.
    """

    def numbers(*shape: int) -> Tensor:
        count = math.prod(shape)
        return (torch.arange(count, device=device) % 251 - 125).to(torch.int8).view(shape)

    experts = 8
    ends = torch.arange(1, experts + 1, device=device) * (WORKLOAD_ROWS // experts)
    scale = torch.full((experts, 1024), 1e-3, device=device)
    return numbers(WORKLOAD_ROWS, hidden), numbers(experts, hidden, 1024), scale, ends


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x, weight, scale, ends = int8_workload(hidden, device)
    per_token_scale = torch.ones(x.shape[0], device=device)
    return x, weight, scale, None, per_token_scale, ends, 0, dtype


QUANT_GROUPED_MATMUL = Operator(
    "quant_grouped_matmul(Tensor x, Tensor weight, Tensor scale, Tensor? bias,"
    " Tensor? per_token_scale, Tensor ends, int act_type, ScalarType output_dtype) -> Tensor",
    reference=_reference,
    fake=_fake,
    npu=[
        torch_npu(_npu, "npu_grouped_matmul", note="the plain formula runs for output_dtype int8")
    ],
    flops=product_flops,
    samples=_samples,
    workload=_workload,
    dtypes=(torch.float16, torch.bfloat16),
    public="mindspeed.ops.quant_gmm.npu_quant_gmm",
)
