"""A frozen linear layer and its adapter as one autograd function, over tensor-parallel ranks.

Layout ``[s, b, h]``; W is this rank's shard, scale = alpha / r and ``u = x A^T`` is ``[s, b, r]``:

    column   A replicated, B sharded like W    y_tp = x W_tp^T + scale u B_tp^T
    row      A sharded like W, B replicated    y = reduce(x_tp W_tp^T + scale u_tp B^T)

The correction is added before the collective of the layer, and in the backward pass the input
gradients of both are reduced together, so the adapter needs no collective. What is left partial on
each rank (the gradient of A in a column layer, of B in a row layer) is summed once per step
(:mod:`mindspeed.lora.linear`).

With sequence parallelism a column layer gathers its input once for both. The backward pass needs
that input again for the gradient of A; instead of gathering or keeping it whole, ``du`` is reduced
together with the input gradient, as the product ``dy [W, B]`` of ``h + r`` columns, and multiplied
with this rank's shard of the input.

Products and collectives are those of :mod:`mindspeed.te.linear_communication`. Saved for backward:
the input shard, W, A, B and u; the frozen layer alone saves W.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed.spmd import Product, typed
from mindspeed.te.linear_communication import (
    LinearCommunication,
    gather,
    multiply,
    multiply_gradient,
    saved_tensors,
)
from mindspeed.te.quantized_weight import dense, operand


def adapted_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    communication: LinearCommunication,
) -> torch.Tensor:
    """``x W^T + bias + scale (x * mask) A^T B^T`` in the dtype of A; differentiable but for W.

    Args:
        x: ``[s, b, in]``, a shard of it as the layer requires.
        weight: Frozen W of this rank, ``[out, in]``.
        bias: ``[out]`` or None.
        a: ``[r, in]``.
        b: ``[out, r]``, in the dtype of A.
        mask: Dropout mask of A's input, ``[s, b, in]`` after gathering; None for no dropout.
        scale: alpha / r.
        communication: How the layer is sharded.
    """
    return _Adapted.apply(x, weight, bias, a, b, mask, scale, communication)  # type: ignore[no-any-return]


@typed(Product(lambda given: given["communication"].typed(), factors=("a", "b")))
class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        communication: LinearCommunication,
    ) -> torch.Tensor:
        dtype = a.dtype
        ctx.scale, ctx.communication, ctx.x_dtype = scale, communication, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        options: dict[str, Any] = {"bias": bias, "keep": True}
        unread = communication.output_unread
        if communication.row or unread:
            u = F.linear(_masked(x, mask), a)
        if communication.row and not unread:  # added to each rank's term, before the reduction
            options["addend"] = (_rows(u) @ b.t()).mul_(scale).view(*u.shape[:-1], -1)
        out, gathered = multiply(x, operand(weight, dtype), communication, **options)
        if not communication.row and not unread:
            u = F.linear(_masked(x if gathered is None else gathered, mask), a)
            out.view(-1, out.shape[-1]).addmm_(_rows(u), b.t(), alpha=scale)
        ctx.save_for_backward(x, weight, a, b, u, mask)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad = grads[0]
        communication: LinearCommunication = ctx.communication
        dbias = _rows(grad).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        if communication.gathers_input:
            dx, da, db = _backward_of_gathered_input(ctx, grad)
        else:
            dx, da, db = _backward(ctx, grad)
        dx = None if dx is None else dx.to(ctx.x_dtype)
        return dx, None, dbias, da, db, None, None, None


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, A and B; ``dx = reduce(dy W + s dy B A)``."""
    communication = ctx.communication
    (x, weight, a, b, u, mask), gathered = saved_tensors(ctx, grad, communication)
    weight = operand(weight, a.dtype)
    dx, reducing, addend, needs_x = None, None, None, ctx.needs_input_grad[0]
    gathered_first = communication.gathers_grad
    if gathered_first and needs_x:
        dx, _, grad = multiply_gradient(grad, weight, communication, keep=True, gathered=gathered)
    elif gathered_first:
        grad = gather(grad, communication.group, gathered)
    du = (grad @ b) * ctx.scale
    if needs_x:
        addend = _masked(du @ a, mask)
        if gathered_first:
            dx = dx.add_(addend)  # type: ignore[union-attr]
        else:
            dx, reducing, _ = multiply_gradient(grad, weight, communication, addend=addend)
    db = _rows(grad).t() @ _rows(u) * ctx.scale
    da = _rows(du).t() @ _rows(_masked(x, mask))
    if reducing is not None:
        reducing.wait()
    return dx, da, db


def _backward_of_gathered_input(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The same where x was gathered: dx and du in one reduce-scatter, by the weight ``[W, B]``."""
    x, weight, a, b, u, mask = ctx.saved_tensors
    communication = ctx.communication
    mask = None if mask is None else _shard(mask, communication.group)
    both = torch.cat((dense(weight, a.dtype), b), 1) if ctx.needs_input_grad[0] else b
    received, reducing, _ = multiply_gradient(grad, both, communication)
    db = _rows(grad).t() @ _rows(u) * ctx.scale
    if reducing is not None:
        reducing.wait()
    if communication.exchange is not None:  # du is read here
        communication.exchange.finish("grad_input")
    dx, du = received.split((both.shape[1] - b.shape[1], b.shape[1]), -1)
    du = du * ctx.scale
    da = _rows(du).t() @ _rows(_masked(x, mask))
    if not ctx.needs_input_grad[0]:
        return None, da, db
    return dx + _masked(du @ a, mask), da, db


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _masked(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return x if mask is None else x * mask


def _shard(whole: torch.Tensor, group: Any) -> torch.Tensor:
    return whole.chunk(group.size(), 0)[dist.get_rank(group)]
