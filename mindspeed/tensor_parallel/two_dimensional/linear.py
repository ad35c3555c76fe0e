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

Products may hide their collective:

    gather_matmul     ring: multiply own rows while the next rank's rows arrive, then those, ...
    matmul_scatter    chunks: multiply some rows while the sums of the rows before are sent

Both send the bytes of the collective that they replace, and results are equal to the bit where the
products of single rows are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import spmd
from mindspeed.ops import overlap
from mindspeed.spmd import Product, typed


@dataclass(frozen=True)
class Products:
    """Kernels of linear layers; :mod:`mindspeed.te.kernels` documents the arguments.

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
class GridCommunication:
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

    def typed(self) -> tuple[spmd.Communication, spmd.Communication]:
        """What it does over either group, as a rule for :mod:`mindspeed.spmd`."""
        return (
            spmd.Communication(self.gathers, gathers=True, shards_input=False),
            spmd.Communication(self.scatters, reduces=True, scatters=True, shards_input=True),
        )


@typed(Product(lambda given: given["communication"].typed()))
class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        communication: GridCommunication,
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
            return matmul_scatter(gathered, weight, scatters)
        multiply = gather_matmul if communication.overlap_gather else products.gather_matmul
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
            multiply = gather_matmul if overlapped else products.gather_matmul
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
    communication: GridCommunication,
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


def gather_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    transposed: bool = True,
    keep: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(x of all ranks) W^T``, or ``... W`` with ``transposed=False``, in a ring.

    Rows go from each rank to the one before it; both directions of a step are one batch, so no
    order of sends and receives can block and one communicator is enough.

    Args:
        x: ``[m, b, k]``, this rank's rows, dtype of the weight.
        weight: ``[n, k]``; ``[k, n]`` with ``transposed=False``.
        group: The ranks that share the rows.
        transposed: Multiply with the transposed weight.
        keep: Return the gathered x as well.

    Returns:
        ``[p m, b, n]``, and ``[p m, b, k]`` or None.
    """
    matrix = weight.t() if transposed else weight
    size, rank = group.size(), group.rank()
    block = x.contiguous()
    out = x.new_empty((size, *x.shape[:-1], matrix.shape[1]))
    whole = x.new_empty((size, *x.shape)) if keep else None
    for step in range(size):
        owner, under_way, following = (rank + step) % size, [], block
        if step + 1 < size:
            following = torch.empty_like(block)
            under_way = _exchange(block, following, group)
        torch.mm(block.flatten(0, -2), matrix, out=out[owner].flatten(0, -2))
        if whole is not None:
            whole[owner] = block
        for work in under_way:
            work.wait()
        block = following
    return out.flatten(0, 1), None if whole is None else whole.flatten(0, 1)


def _exchange(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> list[Any]:
    size, rank = group.size(), group.rank()
    before = dist.get_global_rank(group, (rank - 1) % size)
    after = dist.get_global_rank(group, (rank + 1) % size)
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, before, group),
            dist.P2POp(dist.irecv, received, after, group),
        ]
    )


def matmul_scatter(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``x W^T`` summed over the ranks, this rank's rows of it, in chunks of rows.

    There are as many chunks as ranks, or the largest divisor of that which divides the rows.

    Args:
        x: ``[s, b, k]``, dtype of the weight.
        weight: ``[n, k]``.
        group: The p ranks.

    Returns:
        ``[s/p, b, n]``.
    """
    ranks = group.size()
    out = x.new_empty((x.shape[0] // ranks, *x.shape[1:-1], weight.shape[0]))
    rows = out.view(-1, out.shape[-1])
    chunks = math.gcd(rows.shape[0], ranks)
    overlap.matmul_reduce_scatter(x.reshape(-1, x.shape[-1]), weight.t(), rows, group, chunks)
    return out
