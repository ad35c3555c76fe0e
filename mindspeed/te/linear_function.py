"""A linear layer over tensor-parallel ranks as one autograd function.

What it computes and communicates, forward and backward, is in
:mod:`mindspeed.te.linear_communication`. The reduction of dx and the gathering of x run while other
products are computed. Saved for backward: the input shard and W; the gathered input instead where
``kernels.recompute_all_gather`` returns False, and in recomputed regions, which drop it.

Where a pipeline schedule divides backward, the weight is hidden from autograd, and its gradient is
computed later from the shards of x and dy, which are gathered then.

With fp8 the products are those of :class:`~mindspeed.te.quantization.Casts` between plain
collectives.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.spmd import Product, typed
from mindspeed.te import comm, kernels
from mindspeed.te.linear_communication import (
    LinearCommunication,
    Work,
    gather,
    gather_again,
    multiply,
    multiply_gradient,
    saved_tensors,
)
from mindspeed.te.quantization import Casts
from mindspeed.te.quantized_weight import operand
from mindspeed.te.weight_gradient import Hidden, WgradOptions, add_gradient, weight_gradient
from mindspeed.tensor_parallel import regions


@typed(Product(lambda given: given["communication"].typed()))
class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | Hidden,
        bias: Tensor | None,
        dtype: torch.dtype,
        communication: LinearCommunication,
        wgrad: WgradOptions,
        casts: Casts | None,
    ) -> Tensor:
        ctx.store = None
        if isinstance(weight, Hidden):
            ctx.store, (weight,) = weight
        ctx.communication, ctx.wgrad, ctx.casts = communication, wgrad, casts
        ctx.dtype, ctx.x_dtype = dtype, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        keep = weight.requires_grad and (
            not kernels.recompute_all_gather() or regions.keeps_gathered_inputs()
        )
        if casts is None:
            out, gathered = multiply(x, operand(weight, dtype), communication, bias=bias, keep=keep)
        else:
            out, gathered = _cast_multiply(x, weight, bias, communication, casts)
        ctx.gathered = keep and gathered is not None
        if communication.exchange is not None and communication.gathers_input:
            again = weight.requires_grad and ctx.store is None and not ctx.gathered
            communication.exchange.gathers_again = again
        kept = gathered if ctx.gathered else x
        # Saved-tensor hooks hand back a tensor without the attributes of the parameter.
        ctx.weight = weight
        ctx.save_for_backward(kept if weight.requires_grad else None, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        weight, communication, casts = ctx.weight, ctx.communication, ctx.casts
        (x, _), gathered = saved_tensors(ctx, grad, communication)
        local_grad, (needs_x, needs_weight, needs_bias) = grad, ctx.needs_input_grad[:3]
        # Factors of fp8 are those of this moment.
        later = ctx.store is not None and ctx.store.deferring and casts is None
        now = (needs_weight or ctx.store is not None) and not later
        gathering = None
        if now and communication.gathers_input and not ctx.gathered:
            x, gathering = gather_again(x, communication)
        dx, reducing = None, None
        if casts is not None:
            dx, reducing, grad = _cast_gradient(ctx, grad, weight)
        elif needs_x:
            dx, reducing, grad = multiply_gradient(
                grad,
                operand(weight, ctx.dtype),
                communication,
                keep=now,
                wgrad_follows=now and ctx.wgrad.delayed is None,
                gathered=gathered,
            )
        elif now and communication.gathers_grad:
            grad = gather(grad, communication.group, gathered)
        if gathering is not None:
            gathering.wait()
        dw = None
        if now:
            if casts is not None:
                x, grad = casts.wgrad_operands(x, grad)
            if ctx.store is None:
                dw = weight_gradient(weight, x, grad, ctx.wgrad)
            else:
                run = partial(_add, weight, ctx.wgrad.fuse, None, False, False)
                ctx.store.put(run, x, grad, delay=ctx.wgrad.delay_hidden)
        elif later:
            gathers = communication.gathers_input and not ctx.gathered, communication.gathers_grad
            run = partial(_add, weight, ctx.wgrad.fuse, communication.group, *gathers)
            ctx.store.put(run, x, local_grad)
        db = None
        if needs_bias:
            db = local_grad.reshape(-1, local_grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        if reducing is not None:
            reducing.wait()
        if casts is not None:
            casts.finish()
        return None if dx is None else dx.to(ctx.x_dtype), dw, db, None, None, None, None


def _add(
    weight: Tensor,
    fuse: bool,
    group: Any,
    gathers_input: bool,
    gathers_grad: bool,
    x: Tensor,
    grad: Tensor,
) -> None:
    """Add the gradient of a hidden weight, from the shards of its operands."""
    gathering = None
    if gathers_input:
        x, gathering = comm.all_gather_first_dim(x, group, async_op=True)
    if gathers_grad:
        grad = gather(grad, group)
    if gathering is not None:
        gathering.wait()
    add_gradient(weight, x, grad, fuse)


def _cast_multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, communication: LinearCommunication, casts: Casts
) -> tuple[Tensor, Tensor | None]:
    gathered = gather(x, communication.group) if communication.gathers_input else None
    out = casts.forward(x if gathered is None else gathered, weight).to(x.dtype)
    if communication.row and communication.sequence_parallel:
        out = comm.reduce_scatter_first_dim(out, communication.group)[0]
    elif communication.row:
        dist.all_reduce(out, group=communication.group)
    return out if bias is None else out + bias, gathered


def _cast_gradient(ctx: Any, grad: Tensor, weight: Tensor) -> tuple[Tensor | None, Work, Tensor]:
    communication, casts = ctx.communication, ctx.casts
    if communication.gathers_grad:
        grad = gather(grad, communication.group)
    casts.grad.observe(grad)
    if not ctx.needs_input_grad[0]:
        return None, None, grad
    dx, work = casts.dgrad(grad, weight).to(ctx.dtype), None
    if communication.gathers_input:
        dx, work = comm.reduce_scatter_first_dim(dx, communication.group, async_op=True)
    elif communication.column:
        work = dist.all_reduce(dx, group=communication.group, async_op=True)
    return dx, work, grad


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    communication: LinearCommunication | None = None,
    wgrad: WgradOptions | None = None,
    casts: Casts | None = None,
) -> Tensor:
    """A linear layer in the autocast dtype, or else in the dtype of the weight; differentiable.

    Args:
        x: ``[s, b, in]``, a shard of it as the layer requires (see the module).
        weight: W of this rank, ``[out, in]``.
        bias: ``[out]``.
        communication: How the layer is sharded; not at all by default.
        casts: How operands are quantised to fp8; None: not.
    """
    wgrad, communication = wgrad or WgradOptions(), communication or LinearCommunication()
    if communication.row and communication.exchange is not None:
        wgrad = replace(wgrad, anchor=communication.exchange)
    return _Linear.apply(  # type: ignore[no-any-return]
        x,
        wgrad.hide(x, weight) or weight,
        bias,
        compute_dtype(x, weight),
        communication,
        wgrad,
        casts,
    )


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype a layer computes in: autocast first, then the weight's.

    Args:
        x: ``[..., in]``, which gives the device.
        weight: ``[out, in]``.
    """
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype
