"""Grouped products with int8 weights: ``npu_weight_quant_gmm`` and ``_v2`` (sizes of groups).

    y[g] = act(x[g] @ ((w[g] + antiquant_offset[g]) * antiquant_scale[g]) + bias[g])

Forward only. Source: the A16W8 form of torch_npu's ``npu_grouped_matmul``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._check import ArgumentCheck, public
from mindspeed.ops._numerics import accumulation_dtype, product_flops, random
from mindspeed.ops.compat._activations import BY_CODE
from mindspeed.ops.compat.quant_gmm import int8_workload
from mindspeed.ops.grouped_matmul import cumulative, npu_grouped_matmul, sample_ends
from mindspeed.ops.registry import Operator, torch_npu

__all__ = ["npu_weight_quant_gmm", "npu_weight_quant_gmm_v2"]


def _weight_quant_gmm(
    check: ArgumentCheck,
    sizes: bool,
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    *,
    antiquant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    group_list: Tensor | Sequence[int] | None = None,
    act_type: int = 0,
) -> Tensor:
    """Multiply each group of rows with its own matrix, which is stored in int8.

    Args:
        x: ``[T, K]``, fp16 or bf16, rows sorted by group.
        weight: ``[E, K, N]`` int8.
        antiquant_scale: ``[E, N]``, dtype of ``x``.
        antiquant_offset: ``[E, N]``, dtype of ``x``.
        bias: ``[E, N]``, fp16 with fp16, fp32 with bf16.
        group_list: row after the last of each group, int64 tensor ``[E]`` or list; of ``_v2``
            the rows of each group, a tensor.
        act_type: 0 none, 1 relu, 2 gelu (tanh), 4 fast gelu, 5 silu.

    Returns:
        ``[T, N]`` in the dtype of ``x``.

    Raises:
        OperatorError: wrong dtype, shape, act_type or group_list; an argument that requires a
            gradient.
    """
    if sizes and group_list is not None:
        check.tensor(group_list=group_list)
    check.dtype((torch.float16, torch.bfloat16), x=x)
    check.dtype((torch.int8,), weight=weight)
    check.rank(2, x=x)
    check.rank(3, weight=weight)
    ends = cumulative(check, "group_list", group_list, x, sizes=sizes)
    check.shape((ends.shape[0], x.shape[1], weight.shape[2]), weight=weight)
    columns = (ends.shape[0], weight.shape[2])
    check.tensor(antiquant_scale=antiquant_scale)
    scales = {"antiquant_scale": antiquant_scale, "antiquant_offset": antiquant_offset}
    for name, value in scales.items():
        if value is not None:
            check.dtype((x.dtype,), **{name: value})
            check.shape(columns, **{name: value})
    if bias is not None:
        check.dtype((torch.float16 if x.dtype == torch.float16 else torch.float32,), bias=bias)
        check.shape(columns, bias=bias)
    check.choice(tuple(BY_CODE), act_type=act_type)
    check.same("device", x=x, weight=weight, bias=bias, **scales)
    check.forward_only(x=x, bias=bias, **scales)
    return WEIGHT_QUANT_GROUPED_MATMUL(  # type: ignore[no-any-return]
        x, weight, antiquant_scale, antiquant_offset, bias, ends, act_type
    )


npu_weight_quant_gmm = public("npu_weight_quant_gmm", _weight_quant_gmm, False)
npu_weight_quant_gmm_v2 = public("npu_weight_quant_gmm_v2", _weight_quant_gmm, True)


def dequantised(weight: Tensor, scale: Tensor, offset: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``(weight + offset) * scale`` over the columns of ``[..., k, n]``, computed in ``dtype``."""
    wide = weight.to(dtype)
    if offset is not None:
        wide = wide.add_(offset.unsqueeze(-2))
    return wide.mul_(scale.unsqueeze(-2))


def _reference(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None,
    bias: Tensor | None,
    ends: Tensor,
    act_type: int,
) -> Tensor:
    wide = accumulation_dtype(x)
    out = x.new_empty(x.shape[0], weight.shape[2])
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            offset = None if antiquant_offset is None else antiquant_offset[group]
            matrix = dequantised(weight[group], antiquant_scale[group], offset, wide)
            y = x[start:end].to(wide) @ matrix
            if bias is not None:
                y = y.add_(bias[group])
            out[start:end] = BY_CODE[act_type](y)
        start = end
    return out


def _npu(*operands: Any) -> Tensor:
    x, weight, antiquant_scale, antiquant_offset, bias, ends, act_type = operands
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[2])
    if antiquant_offset is None:  # the op takes scale and offset together
        antiquant_offset = torch.zeros_like(antiquant_scale)
    return npu_grouped_matmul(
        [x],
        [weight],
        bias=None if bias is None else [bias],
        antiquant_scale=[antiquant_scale],
        antiquant_offset=[antiquant_offset],
        group_list=ends,
        group_type=0,
        act_type=act_type,
    )


def _fake(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    for sizes, inner, outer, act in (((3, 0, 5), 8, 16, 0), ((7, 4), 33, 5, 2), ((0,), 4, 8, 1)):
        shape = (len(sizes), inner, outer)
        weight = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
        x, scale = random((sum(sizes), inner), dtype), random((len(sizes), outer), dtype, seed=1)
        offset = random(scale.shape, dtype, seed=2)
        bias = random(scale.shape, dtype, seed=3)
        bias = bias.float() if dtype == torch.bfloat16 else bias
        yield x, weight, scale, None, None, sample_ends(sizes), 0
        yield x, weight, scale, offset, bias, sample_ends(sizes), act


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    rows, weight, scale, ends = int8_workload(hidden, device)
    return rows.to(dtype), weight, scale.to(dtype), None, None, ends, 0


WEIGHT_QUANT_GROUPED_MATMUL = Operator(
    "weight_quant_grouped_matmul(Tensor x, Tensor weight, Tensor antiquant_scale,"
    " Tensor? antiquant_offset, Tensor? bias, Tensor ends, int act_type) -> Tensor",
    reference=_reference,
    fake=_fake,
    npu=[torch_npu(_npu, "npu_grouped_matmul")],
    flops=product_flops,
    samples=_samples,
    workload=_workload,
    dtypes=(torch.float16, torch.bfloat16),
    public="mindspeed.ops.weight_quant_gmm.npu_weight_quant_gmm",
)
