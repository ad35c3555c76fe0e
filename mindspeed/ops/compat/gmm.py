"""Grouped matrix multiplication: ``npu_gmm`` (cumulative group sizes) and ``npu_gmm_v2`` (sizes).

The linear layers of all experts of a rank in one launch, with gradients. With ``gemm_fusion`` the
weight gradient is added in fp32 straight into the ``main_grad`` of the parameter. The operators
behind it are in :mod:`mindspeed.ops.grouped_matmul`; source: Gale et al., "MegaBlocks" (2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._check import ArgumentCheck, public
from mindspeed.ops.grouped_matmul import GROUPED_MATMUL, GROUPED_OUTER, cumulative, in_columns
from mindspeed.ops.npu_groupmatmul_add import GROUPMATMUL_ADD
from mindspeed.spmd import Local, typed

__all__ = ["npu_gmm", "npu_gmm_v2"]


def _gmm(
    check: ArgumentCheck,
    sizes: bool,
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    group_list: Tensor | Sequence[int] | None = None,
    group_type: int = 0,
    gemm_fusion: bool = False,
    original_weight: Tensor | None = None,
) -> Tensor:
    """Multiply each group of rows of ``x`` with its own matrix.

    Args:
        x: ``[T, K]``, rows sorted by group; fp32, bf16 or fp16. For ``group_type`` 2 ``[M, T]``,
            usually the transposed view of ``[T, M]``.
        weight: ``[E, K, N]`` or a transposed view, same dtype. For ``group_type`` 2 ``[T, N]``.
        bias: ``[E, N]``, without gradient; only with ``group_type`` 0 or -1.
        group_list: row after the last of each group, int64 tensor ``[E]`` or list; of ``_v2``
            the rows of each group, a tensor.
        group_type: 0: groups of rows. 2: groups of the inner dimension, for weight gradients.
            -1: no groups, an ordinary product with ``weight [K, N]`` or ``[1, K, N]``.
        gemm_fusion: add the weight gradient to ``original_weight.main_grad``; autograd then gets a
            placeholder (zeros with ``original_weight.zero_out_wgrad``) and
            ``original_weight.grad_added_to_main_grad`` is set, where it exists.
        original_weight: the parameter that ``weight`` is a view of, with ``gemm_fusion``.

    Returns:
        ``[T, N]``, or ``[E, M, N]`` for ``group_type`` 2, where an empty group is zero.

    Raises:
        OperatorError: wrong dtype, shape or group_type; cumulative sizes that decrease or do not
            end at T (checked where reading them is free); no group_list; a bias that requires a
            gradient; ``gemm_fusion`` without a parameter that has a ``main_grad``.
    """
    if sizes and group_list is not None:
        check.tensor(group_list=group_list)
    check.choice((-1, 0, 2), group_type=group_type)
    check.floating(x=x, weight=weight)
    check.rank(2, x=x)
    if bias is not None:
        check.dtype((x.dtype, torch.float32), bias=bias)
        check.same("device", x=x, bias=bias)
        check.require(group_type != 2, "bias", "None for group_type 2", bias)
        check.require(not bias.requires_grad, "bias", "a tensor without gradient", bias)
    if group_type == -1:
        check.require(group_list is None, "group_list", "None for group_type -1", group_list)
        check.rank(2, 3, weight=weight)
        weight = weight if weight.dim() == 3 else weight.unsqueeze(0)
        check.shape((1, x.shape[1], weight.shape[2]), weight=weight)
        bias = bias if bias is None or bias.dim() == 2 else bias.unsqueeze(0)
        group_list = torch.full((1,), x.shape[0], dtype=torch.int64, device=x.device)
    rows = x.t() if group_type == 2 else x
    ends = cumulative(check, "group_list", group_list, rows, sizes=sizes)
    if group_type == 2:
        check.require(not gemm_fusion, "gemm_fusion", "False for group_type 2", gemm_fusion)
        check.rank(2, weight=weight)
        check.shape((rows.shape[0], weight.shape[1]), weight=weight)
        return GROUPED_OUTER(rows, weight, ends)  # type: ignore[no-any-return]
    check.rank(3, weight=weight)
    check.shape((ends.shape[0], x.shape[1], weight.shape[2]), weight=weight)
    if bias is not None:
        check.shape((ends.shape[0], weight.shape[2]), bias=bias)
    if not gemm_fusion:
        return GROUPED_MATMUL(x, weight, bias, ends)  # type: ignore[no-any-return]
    main_grad = getattr(original_weight, "main_grad", None)
    check.require(
        main_grad is not None, "original_weight", "a parameter with a main_grad", original_weight
    )
    check.require(bias is None, "bias", "None with gemm_fusion", bias)
    return _IntoMainGrad.apply(x, weight, ends, [original_weight])  # type: ignore[no-any-return]


npu_gmm = public("npu_gmm", _gmm, False)
npu_gmm_v2 = public("npu_gmm_v2", _gmm, True)


@typed(Local())
class _IntoMainGrad(torch.autograd.Function):
    """The grouped product whose weight gradient goes into the buffer of the parameter.

    Saved for backward: x, the weight and the cumulative group sizes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        original: list[Any],  # in a list: autograd is not to see a second path to the parameter
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.original = original[0]
        return GROUPED_MATMUL(x, weight, None, ends)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, ends = ctx.saved_tensors
        dx = placeholder = None
        if ctx.needs_input_grad[0]:
            dx = GROUPED_MATMUL(dy, weight.transpose(1, 2), None, ends)
        if ctx.needs_input_grad[1]:
            left, right = (dy, x) if in_columns(weight) else (x, dy)
            add_grouped_wgrad(left, right, ends, ctx.original)
            placeholder = placeholder_grad(weight, ctx.original)
        return dx, placeholder, None, None


def add_grouped_wgrad(left: Tensor, right: Tensor, ends: Tensor, parameter: Any) -> None:
    """Add ``left[g]^T @ right[g]`` to the parameter's ``main_grad`` and mark the parameter.

    Args:
        left: ``[T, M]``, floating dtype.
        right: ``[T, N]``, dtype of left.
        ends: int64 ``[E]``, cumulative group sizes.
        parameter: its fp32 ``main_grad`` is viewed as ``[E, M, N]``.
    """
    shape = (ends.shape[0], left.shape[1], right.shape[1])
    GROUPMATMUL_ADD(left, right, ends, parameter.main_grad.view(shape))
    if hasattr(parameter, "grad_added_to_main_grad"):
        parameter.grad_added_to_main_grad = True


def placeholder_grad(weight: Tensor, parameter: Any) -> Tensor | None:
    """Return a placeholder that autograd gets as the gradient, so that the parameter's hooks run.

    Its values mean nothing unless the owner of the buffer requires zeros (``zero_out_wgrad``:
    the parameter also receives gradients another way). None where no hook waits for it.
    """
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    if getattr(parameter, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)
