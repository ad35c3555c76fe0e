"""``gmm``: the call of the ``grouped_gemm`` package, for one stacked weight of all experts.

    y[group i] = a[group i] @ b[i]        a [t, k], rows sorted by group        b [groups, k, n]

Saved for backward: both operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed import spmd
from mindspeed.spmd import Arguments, Communication, typed
from mindspeed.te import device_groups
from mindspeed.te.device_groups import Splits
from mindspeed.te.weight_gradient import (
    GradientAnchor,
    Hidden,
    WgradOptions,
    add_product,
    added_to_main_grad,
)
from mindspeed.tensor_parallel import regions


def _experts(given: Arguments) -> list[tuple[Tensor, None]]:
    """The stacked weight of a call of the function below."""
    hidden = given["hidden"]
    return [(given["weight"] if hidden is None else hidden.weights[0], None)]


def _layer(given: Arguments) -> Communication:
    """A parameter ``[k, n]`` is sharded along k by the ranks that share an expert, or along n."""
    (weight, _), *_ = _experts(given)
    parameter = weight if weight._base is None else weight._base
    sharded = getattr(parameter, "partition_dim", -1)
    return Communication(shards_input=sharded == int(given["trans_b"]))


@typed(spmd.Product(_layer, experts=_experts))
class _GroupedMatmul(torch.autograd.Function):
    """Tokens of each group times that group's slice of one stacked weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        splits: Splits,
        trans_b: bool,
        fuse_into: list[Any],  # in a list: autograd is not to see a second path to the parameter
        hidden: Hidden | None,
        anchored: Anchored | None,
        unread: bool,
    ) -> Tensor:
        ctx.hidden, ctx.anchored = hidden, anchored
        ctx.save_for_backward(x, weight)
        ctx.splits, ctx.trans_b, ctx.fuse_into = splits, trans_b, fuse_into
        if unread:
            return x.new_zeros(()).expand(len(x), weight.shape[1 if trans_b else 2]).data
        return device_groups.matmul(x, weight.unbind(0), splits, trans_b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad, (x, weight), splits = grads[0].contiguous(), ctx.saved_tensors, ctx.splits
        dgrad = wgrad = None
        if ctx.needs_input_grad[0]:
            dgrad = device_groups.matmul(grad, weight.unbind(0), splits, not ctx.trans_b)
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
        return dgrad, wgrad, None, None, None, None, None, None


class Anchored(NamedTuple):
    """The anchor that takes the gradient of a parameter.

    Attributes:
        anchor: takes its computation.
        parameter: that the product views as one matrix for each group.
    """

    anchor: GradientAnchor
    parameter: Tensor


def _compute(
    left: Tensor, right: Tensor, splits: Splits, shape: Sequence[int], fuse_into: list[Any]
) -> Tensor | None:
    """The gradient in the shape of the matrices, or a placeholder for it."""
    for parameter in fuse_into:
        main_grads = parameter.main_grad.view(shape).unbind(0)
        device_groups.accumulate_wgrad(left, right, splits, main_grads)
        return added_to_main_grad(parameter, shape)
    return device_groups.wgrad(left, right, splits)


def _shaped(grad: Tensor | None, parameter: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(parameter.dtype).view(parameter.shape)


def _add(
    parameter: Tensor,
    shape: Sequence[int],
    splits: Splits,
    trans_b: bool,
    fuse: bool,
    x: Tensor,
    grad: Tensor,
) -> None:
    """Add the gradient of a hidden parameter, which the product views as ``shape``."""
    left, right = (grad, x) if trans_b else (x, grad)
    if fuse:
        main_grads = parameter.main_grad.view(shape).unbind(0)  # type: ignore[attr-defined]
        device_groups.accumulate_wgrad(left, right, splits, main_grads)
    else:
        product = device_groups.wgrad(left, right, splits)
        add_product(parameter, product.to(parameter.dtype).view(parameter.shape))


def gmm(
    a: Tensor,
    b: Tensor,
    batch_sizes: Tensor,
    trans_b: bool = False,
    *,
    fuse_into: Tensor | None = None,
    hidden: Hidden | None = None,
    anchored: Anchored | None = None,
    unread: bool = False,
) -> Tensor:
    """Multiply group i of the rows of ``a [t, k]`` with ``b[i]``, the grouped_gemm package's call.

    Args:
        a: ``[t, k]``, rows sorted by group.
        b: ``[groups, k, n]``, or ``[groups, n, k]`` with ``trans_b``.
        batch_sizes: int ``[groups]``, rows of each group.
        fuse_into: Parameter that ``b`` is a view of; the weight gradient is added to its
            ``main_grad``.
        hidden: The parameter that ``b`` is a view of, if autograd is not to see it.
        anchored: The same, if an anchor takes its gradient.
        unread: Nothing reads the result, which is zero then.

    Returns:
        ``[t, n]`` in the dtype of ``a``; differentiable.
    """
    parameters = [] if getattr(fuse_into, "main_grad", None) is None else [fuse_into]
    matrices = b if hidden is None else b.detach()
    sizes = batch_sizes.tolist()
    return _GroupedMatmul.apply(  # type: ignore[no-any-return]
        a, matrices, sizes, trans_b, parameters, hidden, anchored, unread
    )


def grouped_mlp_forward(
    self: Any,
    permuted_local_hidden_states: Tensor,
    tokens_per_expert: Tensor,
    permuted_probs: Tensor,
) -> tuple[Tensor, None]:
    """Compute the local experts; stands in for ``GroupedMLP.forward``.

    Args:
        permuted_local_hidden_states: ``[t, h]``, tokens sorted by expert.
        tokens_per_expert: int ``[experts]``, tokens of each local expert.
        permuted_probs: ``[t]``, the router's probability of each token.
    """
    x, config = permuted_local_hidden_states, self.config
    probs = permuted_probs.unsqueeze(-1)
    if config.moe_apply_probs_on_input:
        if config.moe_router_topk != 1:
            raise ValueError("--moe-apply-probs-on-input needs --moe-router-topk 1")
        x, probs = (x * probs).to(x.dtype), torch.ones_like(probs)
    first, second = products_of(self)
    hidden = first.forward(x, tokens_per_expert)
    if not self.activation_recompute:
        return second.forward(
            self.activation_func_with_probs(hidden, probs), tokens_per_expert
        ), None
    from megatron.core.tensor_parallel import CheckpointWithoutOutput

    self.activation_checkpoint = CheckpointWithoutOutput()
    active = self.activation_checkpoint.checkpoint(self.activation_func_with_probs, hidden, probs)
    out = second.forward(active, tokens_per_expert)
    self.activation_checkpoint.discard_output_and_register_recompute(out)
    return out, None


class GroupedProduct:
    """One of the two linear layers of Megatron's ``GroupedMLP``.

    Args:
        shape: Of the parameter as one matrix for each expert.
    """

    def __init__(self, experts: Any, weight: str, shape: tuple[int, int, int]) -> None:
        self.experts, self._weight, self._shape = experts, weight, shape

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Multiply ``x [t, in]``, rows of ``sizes [experts]`` sorted by expert: ``[t, out]``."""
        experts = self.experts
        # The seam ``chunk`` gives a store to the modules whose backward is divided.
        store = getattr(experts, "weight_gradients", None)
        anchor = getattr(experts, "gradient_anchor", None)
        fuse = experts.config.gradient_accumulation_fusion
        options = WgradOptions(fuse, store=store, anchor=anchor)
        weight = getattr(experts, self._weight)
        fuse_into, hidden = weight if options.fuse else None, options.hide(x, weight)
        anchored = None if anchor is None else Anchored(anchor, weight)
        matrices = weight.view(self._shape)
        unread = self._weight == SECOND and regions.output_unread(experts)
        return gmm(
            x,
            matrices,
            sizes,
            fuse_into=fuse_into,
            hidden=hidden,
            anchored=anchored,
            unread=unread,
        )


SECOND = "weight2"
_PRODUCTS = "_linear_layers"
"""Attribute of the module: its two products."""


def products_of(experts: Any) -> tuple[GroupedProduct, GroupedProduct]:
    """The two linear layers of Megatron's ``GroupedMLP``, the same objects at every call."""
    known: tuple[GroupedProduct, GroupedProduct] | None = vars(experts).get(_PRODUCTS)
    if known is None or known[0].experts is not experts:  # of the module that this is a copy of
        number, width = experts.num_local_experts, experts.config.hidden_size
        known = vars(experts)[_PRODUCTS] = (
            GroupedProduct(experts, "weight1", (number, width, -1)),
            GroupedProduct(experts, SECOND, (number, -1, width)),
        )
    return known
