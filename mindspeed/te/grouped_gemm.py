"""``gmm``: the call of the ``grouped_gemm`` package, for one stacked weight of all experts.

    y[group i] = a[group i] @ b[i]        a [t, k], rows sorted by group        b [groups, k, n]

Saved for backward: both operands.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.te import kernels
from mindspeed.te.weight_gradient import added_to_main_grad


class _GroupedMatmul(torch.autograd.Function):
    """Tokens of each group times that group's slice of one stacked weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        splits: list[int],
        trans_b: bool,
        fuse_into: list[Any],  # in a list: autograd is not to see a second path to the parameter
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.splits, ctx.trans_b, ctx.fuse_into = splits, trans_b, fuse_into
        return kernels.grouped_matmul(x, weight.unbind(0), splits, trans_b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad, (x, weight), splits = grads[0].contiguous(), ctx.saved_tensors, ctx.splits
        dgrad = wgrad = None
        if ctx.needs_input_grad[0]:
            dgrad = kernels.grouped_matmul(grad, weight.unbind(0), splits, not ctx.trans_b)
        if ctx.needs_input_grad[1]:
            left, right = (grad, x) if ctx.trans_b else (x, grad)
            for parameter in ctx.fuse_into:
                main_grads = parameter.main_grad.view(weight.shape).unbind(0)
                kernels.accumulate_grouped_wgrad(left, right, splits, main_grads)
                wgrad = added_to_main_grad(parameter, weight.shape)
            if not ctx.fuse_into:
                wgrad = kernels.grouped_wgrad(left, right, splits)
        return dgrad, wgrad, None, None, None


def gmm(
    a: torch.Tensor,
    b: torch.Tensor,
    batch_sizes: torch.Tensor,
    trans_b: bool = False,
    *,
    fuse_into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply group i of the rows of ``a [t, k]`` with ``b[i]``, the grouped_gemm package's call.

    Args:
        a: ``[t, k]``, rows sorted by group.
        b: ``[groups, k, n]``, or ``[groups, n, k]`` with ``trans_b``.
        batch_sizes: int ``[groups]``, rows of each group.
        trans_b: Multiply with the transposed matrices.
        fuse_into: Parameter that ``b`` is a view of; the weight gradient is added to its
            ``main_grad``.

    Returns:
        ``[t, n]`` in the dtype of ``a``; differentiable.
    """
    parameters = [] if getattr(fuse_into, "main_grad", None) is None else [fuse_into]
    return _GroupedMatmul.apply(a, b, batch_sizes.tolist(), trans_b, parameters)  # type: ignore[no-any-return]
