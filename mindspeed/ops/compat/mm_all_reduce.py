"""``all_reduce(x1 @ x2 + bias)`` with plain, weight-quantised and fully quantised operands.

=============  ==========  ==========  ==========================================================
form           x1          x2          each rank's term
=============  ==========  ==========  ==========================================================
plain          16, 32 bit  dtype of x1 ``x1 @ x2 + bias``
weight int8    fp16, bf16  int8        ``x1 @ ((x2 + antiquant_offset) * antiquant_scale) + bias``
int8           int8        int8        ``(x1 @ x2 + bias) * dequant_scale``, bias int32
=============  ==========  ==========  ==========================================================

The bias is inside the sum: given on all W ranks it counts W times, so one rank passes it, or each
passes bias / W. Terms are rounded to the output's dtype before they travel: ``[m, n]`` of it in one
all-reduce. Source: the formulas of torch_npu's ``npu_mm_all_reduce_base``.

``npu_mm_all_reduce_add_rms_norm`` is the end of a row-parallel linear in inference; its twin with a
final underscore works in its residual:

    y = all_reduce(x1 @ x2 + bias) + residual
    norm_out = y / sqrt(mean(y^2) + epsilon) * gamma

Source: the operator of the same name in CANN. torch_npu has it no more, so the product with its
all-reduce is one fused kernel there and the norm another.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.ops._check import FLOATS, ArgumentCheck, public
from mindspeed.ops._numerics import accumulation_dtype, product_flops
from mindspeed.ops.compat.quant_gmm import int_product, unpacked_scale
from mindspeed.ops.process_groups import comm_name, group_name, resolve
from mindspeed.ops.registry import Operator, note_fallback, torch_npu
from mindspeed.ops.rms_norm import rms_norm

__all__ = [
    "MM_ALL_REDUCE",
    "check_weight_int8",
    "npu_mm_all_reduce_add_rms_norm",
    "npu_mm_all_reduce_add_rms_norm_",
]


def _check_residual(
    check: ArgumentCheck,
    x1: Tensor,
    x2: Tensor,
    residual: Tensor,
    gamma: Tensor,
    epsilon: float,
    dtype: torch.dtype,
) -> None:
    check.same("device", x1=x1, residual=residual, gamma=gamma)
    check.dtype((dtype,), residual=residual)
    shape = (*x1.shape[:-1], x2.size(1))
    fits = residual.numel() == math.prod(shape) and residual.shape[-1:] == shape[-1:]
    check.require(fits, "residual", f"shape {shape}", tuple(residual.shape))
    check.dtype((dtype, torch.float32), gamma=gamma)
    check.shape(shape[-1:], gamma=gamma)
    check.require(epsilon > 0, "epsilon", "a number greater than 0", epsilon)


def _check_int8(
    check: ArgumentCheck,
    x1: Tensor,
    x2: Tensor,
    antiquant_scale: Tensor | None,
    dequant_scale: Tensor,
) -> None:
    check.dtype((torch.int8,), x1=x1, x2=x2)
    check.require(
        antiquant_scale is None, "antiquant_scale", "None together with dequant_scale", "a tensor"
    )
    if dequant_scale.dtype != torch.int64:
        check.dtype((torch.bfloat16, torch.float32), dequant_scale=dequant_scale)
    _one_of(check, [(1,), (x2.size(1),), (1, x2.size(1))], dequant_scale=dequant_scale)


def check_weight_int8(
    check: ArgumentCheck,
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    group_size: int,
) -> None:
    """Check int8 weights x2 ``[k, n]`` with their scale and offset, of one shape: ``[1]``, ``[n]``
    or ``[1, n]``, or ``[ceil(k / group_size), n]`` for groups of rows."""
    check.dtype(FLOATS, x1=x1)
    check.dtype((torch.int8,), x2=x2)
    check.dtype((x1.dtype,), antiquant_scale=scale, antiquant_offset=offset)
    k, n = x2.shape
    if group_size:
        check.require(
            group_size % 32 == 0 and 32 <= group_size <= k - 1,
            "antiquant_group_size",
            f"0, or a multiple of 32 between 32 and k - 1 = {k - 1}",
            group_size,
        )
        _one_of(check, [(-(-k // group_size), n)], antiquant_scale=scale)
    else:
        _one_of(check, [(1,), (n,), (1, n)], antiquant_scale=scale)
    if offset is not None:
        check.shape(scale.shape, antiquant_offset=offset)


def _one_of(check: ArgumentCheck, shapes: list[tuple[int, ...]], **given: Tensor) -> None:
    for name, x in given.items():
        expected = "shape " + " or ".join(map(str, shapes))
        check.require(tuple(x.shape) in shapes, name, expected, tuple(x.shape))


def _reference(
    x1: Tensor,
    x2: Tensor,
    bias: Tensor | None,
    antiquant_scale: Tensor | None,
    antiquant_offset: Tensor | None,
    dequant_scale: Tensor | None,
    antiquant_group_size: int,
    group: str,
) -> Tensor:
    if dequant_scale is not None:
        term = int_product(x1.flatten(0, -2), x2)
        term = term if bias is None else term.add_(bias)
        term = term * unpacked_scale(dequant_scale)
    elif antiquant_scale is not None:
        x = x1.to(accumulation_dtype(x1))
        weight = x2.to(x.dtype)
        if antiquant_offset is not None:
            weight.add_(_by_row(antiquant_offset, x2, antiquant_group_size))
        weight.mul_(_by_row(antiquant_scale, x2, antiquant_group_size))
        term = x @ weight
        term = term if bias is None else term.add_(bias)
    else:
        # Both accumulate in fp32 and round once, the bias included.
        term = x1 @ x2 if bias is None else torch.addmm(bias, x1.flatten(0, -2), x2)
    term = term.to(_output_dtype(x1, dequant_scale)).view(*x1.shape[:-1], x2.size(1))
    dist.all_reduce(term, group=resolve(group))
    return term


def _by_row(part: Tensor, x2: Tensor, group_size: int) -> Tensor:
    """A scale or offset that fits x2 when each of its rows is for ``group_size`` rows of x2."""
    return part.repeat_interleave(group_size, 0)[: x2.size(0)] if group_size else part


def _output_dtype(x1: Tensor, dequant_scale: Tensor | None) -> torch.dtype:
    if dequant_scale is None:
        return x1.dtype
    return torch.bfloat16 if dequant_scale.dtype == torch.bfloat16 else torch.float16


def _npu(*operands: Any) -> Tensor:
    x1, x2, bias, antiquant_scale, antiquant_offset, dequant_scale, group_size, group = operands
    if x1.dtype in (torch.float32, torch.float64) or not x1.numel():
        note_fallback("mm_all_reduce", "npu_mm_all_reduce_base takes no fp32 and no empty x1")
        return _reference(*operands)
    if dequant_scale is not None and dequant_scale.dtype == torch.float32:
        dequant_scale = torch.ops.npu.npu_trans_quant_param(dequant_scale.flatten())
    return torch.ops.npu.npu_mm_all_reduce_base(
        x1.contiguous(),
        x2,
        comm_name(resolve(group)),
        bias=bias,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        dequant_scale=dequant_scale,
        antiquant_group_size=group_size,
    )


def _fake(x1: Tensor, x2: Tensor, *rest: Any) -> Tensor:
    dequant_scale = rest[3]
    return x1.new_empty((*x1.shape[:-1], x2.size(1)), dtype=_output_dtype(x1, dequant_scale))


MM_ALL_REDUCE = Operator(
    "mm_all_reduce(Tensor x1, Tensor x2, Tensor? bias, Tensor? antiquant_scale,"
    " Tensor? antiquant_offset, Tensor? dequant_scale, int antiquant_group_size, str group)"
    " -> Tensor",
    reference=_reference,
    fake=_fake,
    npu=[
        torch_npu(
            _npu,
            "npu_mm_all_reduce_base",
            "npu_trans_quant_param",
            note="the plain formula runs for fp32 and an empty x1",
        )
    ],
    flops=product_flops,
    samples=lambda dtype: (),  # without a group there is nothing to run
    public="mindspeed.ops.npu_mm_all_reduce_add_rms_norm.npu_mm_all_reduce_add_rms_norm",
)


def _add_rms_norm(
    check: ArgumentCheck,
    in_place: bool,
    x1: Tensor,
    x2: Tensor,
    residual: Tensor,
    gamma: Tensor,
    hcom: dist.ProcessGroup | str,
    reduce_op: str = "sum",
    epsilon: float = 1e-06,
    bias: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    dequant_scale: Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
) -> tuple[Tensor, Tensor]:
    """Multiply, sum over the group, add the residual and normalise.

    Args:
        x1: ``[b, s, k]`` or ``[s, k]``: fp16, bf16, fp32, or int8 with ``dequant_scale``.
        x2: ``[k, n]``, also as the transposed view of ``[n, k]``: dtype of x1, or int8 with
            ``antiquant_scale``.
        residual: ``[b, s, n]`` or, where x1 has two dimensions, any shape of s rows of n; dtype of
            the output.
        gamma: ``[n]``, dtype of residual or fp32.
        hcom: the group, its name, or the name of its HCCL communicator; each rank holds a slice
            of k.
        reduce_op: "sum".
        epsilon: added to the mean square.
        bias: ``[n]``; it is inside the sum over ranks: pass it on one rank, or bias / W on each.
        antiquant_scale: scale of an int8 x2, for the whole (``[1]``), by column (``[n]``) or by
            rows (``[ceil(k / antiquant_group_size), n]``): ``(x2 + offset) * scale``.
        antiquant_offset: as antiquant_scale.
        dequant_scale: scale of the int8 product, ``[1]`` or ``[n]``: bf16 for a bf16 output, fp32
            or int64 (as npu_trans_quant_param makes it) for fp16.
        antiquant_group_size: rows of x2 that share a scale, or 0.
        comm_turn: 0.

    Returns:
        y, of the twin with a final underscore in ``residual`` itself, and norm_out, both with the
        shape and dtype of residual.

    Raises:
        OperatorError: wrong dtypes, shapes or options, an unknown group, a gradient is required.
    """
    check.choice(("sum",), reduce_op=reduce_op)
    check.choice((0,), comm_turn=comm_turn)
    check.rank(2, 3, x1=x1)
    check.rank(2, x2=x2)
    check.require(x2.size(0) == x1.size(-1), "x2", f"{x1.size(-1)} rows, as x1 has columns", x2)
    check.same("device", x1=x1, x2=x2, bias=bias, antiquant_scale=antiquant_scale)
    check.same("device", x1=x1, antiquant_offset=antiquant_offset, dequant_scale=dequant_scale)
    if bias is not None:
        check.shape(x2.shape[1:], bias=bias)
        check.dtype((torch.int32,) if dequant_scale is not None else (x1.dtype,), bias=bias)
    if dequant_scale is not None:
        _check_int8(check, x1, x2, antiquant_scale, dequant_scale)
    elif antiquant_scale is not None:
        check_weight_int8(check, x1, x2, antiquant_scale, antiquant_offset, antiquant_group_size)
    else:
        check.floating(x1=x1, x2=x2)
        check.require(
            antiquant_offset is None, "antiquant_offset", "None without antiquant_scale", "a tensor"
        )
        check.require(
            antiquant_group_size == 0, "antiquant_group_size", "0 without antiquant_scale",
            antiquant_group_size,
        )  # fmt: skip
    _check_residual(check, x1, x2, residual, gamma, epsilon, _output_dtype(x1, dequant_scale))
    check.forward_only(x1=x1, x2=x2, residual=residual, gamma=gamma, bias=bias)
    check.forward_only(antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset)
    check.forward_only(dequant_scale=dequant_scale)
    product = MM_ALL_REDUCE(
        x1, x2, bias, antiquant_scale, antiquant_offset, dequant_scale, antiquant_group_size,
        group_name(check, hcom=hcom),
    ).view_as(residual)  # fmt: skip
    y = residual.add_(product) if in_place else product.add_(residual)
    return y, rms_norm(y, gamma, epsilon)


npu_mm_all_reduce_add_rms_norm = public("npu_mm_all_reduce_add_rms_norm", _add_rms_norm, False)
npu_mm_all_reduce_add_rms_norm_ = public("npu_mm_all_reduce_add_rms_norm_", _add_rms_norm, True)
