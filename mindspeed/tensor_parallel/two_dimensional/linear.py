"""The linear layer of the grid, one differentiable function.

    y = S( G(x) W^T )      G all-gathers rows over one group, S reduce-scatters rows over the other

    ===========  =====================  ==================  =====================
    layer        x                      W                   y
    ===========  =====================  ==================  =====================
    qkv, fc1     ``[s/X, b, in/Y]``     ``[out/X, in/Y]``   ``[s/Y, b, out/X]``     G = x, S = y
    proj, fc2    ``[s/Y, b, in/X]``     ``[out/Y, in/X]``   ``[s/X, b, out/Y]``     G = y, S = x
    ===========  =====================  ==================  =====================

The backward pass is the same with the groups swapped: dx = S_G( G_S(dy) W ). It gathers x again for
dW, while dx is computed; dx is reduce-scattered while dW is computed. Saved: the shard of x, and W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.tensor_parallel.two_dimensional import overlap


@dataclass(frozen=True)
class Products:
    """What linear layers compute and send; :mod:`mindspeed.te.kernels` documents the arguments.

    Attributes:
        gather: ``(x, group, async_op=) -> (gathered, handle)``, along the first dimension.
        scatter: ``(x, group, async_op=) -> (shard of the sum, handle)``, likewise.
        gather_matmul: ``(x, W, group, transposed=, keep=) -> (product, gathered x or None)``.
        weight_gradient: ``(W, x, dy) -> dW``, or None where it is not autograd's business.
    """

    gather: Callable[..., tuple[torch.Tensor, Any]]
    scatter: Callable[..., tuple[torch.Tensor, Any]]
    gather_matmul: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    weight_gradient: Callable[..., torch.Tensor | None]


@dataclass(frozen=True)
class Communication:
    """The two groups of a layer, and which collectives are hidden behind its products.

    Attributes:
        gathers: Group over which x is gathered.
        scatters: Group over which y is reduce-scattered.
        overlap_gather: Forward: multiply one rank's rows while the next rank's arrive.
        overlap_scatter: Forward: multiply some rows while the sums of others are sent.
        overlap_backward: Backward: as ``overlap_gather``, for dy.
    """

    gathers: dist.ProcessGroup
    scatters: dist.ProcessGroup
    overlap_gather: bool = False
    overlap_scatter: bool = False
    overlap_backward: bool = False


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        communication: Communication,
        products: Products,
    ) -> torch.Tensor:
        ctx.communication, ctx.products, ctx.x_dtype = communication, products, x.dtype
        x = x.to(weight.dtype)
        # Saved-tensor hooks hand back a tensor without the attributes of the parameter.
        ctx.weight = weight
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        gathers, scatters = communication.gathers, communication.scatters
        if communication.overlap_scatter:
            gathered, _ = products.gather(x, gathers)
            return overlap.matmul_scatter(gathered, weight, scatters)
        multiply = overlap.gather_matmul if communication.overlap_gather else products.gather_matmul
        product, _ = multiply(x, weight, gathers)
        return products.scatter(product, scatters)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        communication, products = ctx.communication, ctx.products
        gathers, scatters = communication.gathers, communication.scatters
        grad, (needs_x, needs_weight) = grads[0].to(weight.dtype), ctx.needs_input_grad[:2]
        dx = dw = gathering = scattering = None
        if needs_weight:
            x, gathering = products.gather(x, gathers, async_op=True)
        if needs_x:
            overlapped = communication.overlap_backward
            multiply = overlap.gather_matmul if overlapped else products.gather_matmul
            product, gathered = multiply(
                grad, weight, scatters, transposed=False, keep=needs_weight
            )
            dx, scattering = products.scatter(product, gathers, async_op=True)
        elif needs_weight:
            gathered, _ = products.gather(grad, scatters)
        if gathering is not None:
            gathering.wait()
        if needs_weight:
            dw = products.weight_gradient(ctx.weight, x, gathered)
        if scattering is not None:
            scattering.wait()
        return None if dx is None else dx.to(ctx.x_dtype), dw, None, None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    communication: Communication,
    products: Products,
) -> torch.Tensor:
    """Gather, multiply, scatter; differentiable, collective over both groups.

    Bytes sent by a rank, forward: ``(X - 1) |x| + (Y - 1) |y|`` with the sizes of the shards of a
    first layer (X and Y swapped for a second one); backward that and x or dy once more.

    Args:
        x: ``[s/X, b, in/Y]`` of a first layer, ``[s/Y, b, in/X]`` of a second one.
        weight: ``[out/X, in/Y]``, or ``[out/Y, in/X]``; the product is computed in its dtype.
        bias: ``[out/X]``, or ``[out/Y]``; added once, after the reduction. Its gradient is that of
            this rank's rows.
        communication: The groups.
        products: What is computed and sent.

    Returns:
        ``[s/Y, b, out/X]``, or ``[s/X, b, out/Y]``, in the dtype of the weight.
    """
    out: torch.Tensor = _Linear.apply(x, weight, communication, products)
    return out if bias is None else out + bias.to(out.dtype)
