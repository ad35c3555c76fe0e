"""``gmm``: the call of the ``grouped_gemm`` package, for one stacked weight of all experts.

    y[group i] = a[group i] @ b[i]        a [t, k], rows sorted by group        b [groups, k, n]

Saved for backward: both operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from mindspeed.spmd import Local, typed
from mindspeed.te import kernels
from mindspeed.te.weight_gradient import (
    GradientAnchor,
    Hidden,
    add_product,
    added_to_main_grad,
)


@typed(Local())
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
        hidden: Hidden | None,
        anchored: Anchored | None,
    ) -> torch.Tensor:
        ctx.hidden, ctx.anchored = hidden, anchored
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
            compute = partial(_compute, left, right, splits, weight.shape, ctx.fuse_into)
            if ctx.anchored is None:
                wgrad = compute()
            else:
                anchor, parameter = ctx.anchored
                anchor.put([parameter], lambda: [_shaped(compute(), parameter)])
        if ctx.hidden is not None:
            store, (parameter,) = ctx.hidden
            add = partial(_add, parameter, weight.shape, splits, ctx.trans_b, bool(ctx.fuse_into))
            store.put(add, x, grad)
        return dgrad, wgrad, None, None, None, None, None


class Anchored(NamedTuple):
    """Where the gradient of a parameter goes.

    Attributes:
        anchor: takes its computation.
        parameter: that the product views as one matrix for each group.
    """

    anchor: GradientAnchor
    parameter: torch.Tensor


def _compute(
    left: torch.Tensor,
    right: torch.Tensor,
    splits: list[int],
    shape: Sequence[int],
    fuse_into: list[Any],
) -> torch.Tensor | None:
    """The gradient in the shape of the matrices, or a placeholder for it."""
    for parameter in fuse_into:
        main_grads = parameter.main_grad.view(shape).unbind(0)
        kernels.accumulate_grouped_wgrad(left, right, splits, main_grads)
        return added_to_main_grad(parameter, shape)
    return kernels.grouped_wgrad(left, right, splits)


def _shaped(grad: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
    return None if grad is None else grad.to(parameter.dtype).view(parameter.shape)


def _add(
    parameter: torch.Tensor,
    shape: Sequence[int],
    splits: list[int],
    trans_b: bool,
    fuse: bool,
    x: torch.Tensor,
    grad: torch.Tensor,
) -> None:
    """Add the gradient of a hidden parameter, which the product views as ``shape``."""
    left, right = (grad, x) if trans_b else (x, grad)
    if fuse:
        main_grads = parameter.main_grad.view(shape).unbind(0)  # type: ignore[attr-defined]
        kernels.accumulate_grouped_wgrad(left, right, splits, main_grads)
    else:
        product = kernels.grouped_wgrad(left, right, splits)
        add_product(parameter, product.to(parameter.dtype).view(parameter.shape))


def gmm(
    a: torch.Tensor,
    b: torch.Tensor,
    batch_sizes: torch.Tensor,
    trans_b: bool = False,
    *,
    fuse_into: torch.Tensor | None = None,
    hidden: Hidden | None = None,
    anchored: Anchored | None = None,
) -> torch.Tensor:
    """Multiply group i of the rows of ``a [t, k]`` with ``b[i]``, the grouped_gemm package's call.

    Args:
        a: ``[t, k]``, rows sorted by group.
        b: ``[groups, k, n]``, or ``[groups, n, k]`` with ``trans_b``.
        batch_sizes: int ``[groups]``, rows of each group.
        trans_b: Multiply with the transposed matrices.
        fuse_into: Parameter that ``b`` is a view of; the weight gradient is added to its
            ``main_grad``.
        hidden: The parameter that ``b`` is a view of, if autograd is not to see it.
        anchored: The same, if an anchor takes its gradient.

    Returns:
        ``[t, n]`` in the dtype of ``a``; differentiable.
    """
    parameters = [] if getattr(fuse_into, "main_grad", None) is None else [fuse_into]
    matrices = b if hidden is None else b.detach()
    sizes = batch_sizes.tolist()
    return _GroupedMatmul.apply(  # type: ignore[no-any-return]
        a, matrices, sizes, trans_b, parameters, hidden, anchored
    )
