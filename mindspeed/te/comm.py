"""Tensor-parallel collectives with gradients.

Activations are ``[s, b, h]``; sequence parallelism splits the first dimension. Each pair is the
other's transpose:

    forward                     backward
    all_reduce                  identity
    reduce_scatter (dim 0)      all_gather (dim 0)
    all_gather (dim 0)          reduce_scatter (dim 0)

What a column-parallel layer communicates before its product (all_gather / identity) is inside
:mod:`mindspeed.te.linear_communication`, where their backward overlaps the weight gradient.
A feature may replace :func:`all_gather_first_dim` and :func:`reduce_scatter_first_dim` for all
linear layers (``seams.use_kernels``).
Bytes per call and rank for a tensor of B bytes and p ranks: all_reduce 2 B (p-1)/p, the others
B (p-1)/p.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.spmd import Collective, I, P, R, V, typed


def group_size(group: Any) -> int:
    """Return the number of ranks of ``group``; 1 without a group."""
    return 1 if group is None else group.size()


def all_gather_first_dim(x: Tensor, group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    """Gather ``[s/p, ...]``, any dtype, to ``[s, ...]``; return the result and a work handle."""
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    work = dist.all_gather_into_tensor(gathered, x.contiguous(), group=group, async_op=async_op)
    return gathered, work


def reduce_scatter_first_dim(x: Tensor, group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    """Sum ``[s, ...]``, any dtype, over p ranks; return own ``[s/p, ...]`` and a work handle."""
    size = group.size()
    if x.shape[0] % size:
        raise ValueError(
            f"sequence parallelism: the sequence length {x.shape[0]} is not divisible by the "
            f"tensor-parallel size {size}; pad the sequence, add --unaligned-linear or switch "
            "--sequence-parallel off"
        )
    shard = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    work = dist.reduce_scatter_tensor(shard, x.contiguous(), group=group, async_op=async_op)
    return shard, work


@typed(Collective(P, V, sums=True))
class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return reduce_scatter_first_dim(x, group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return all_gather_first_dim(grads[0], ctx.group)[0], None


@typed(Collective(V, R))
class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_gather_first_dim(x, group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return reduce_scatter_first_dim(grads[0], ctx.group)[0], None


@typed(Collective(P, I, sums=True))
class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous()
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0], None


def reduce_output(x: Tensor, group: Any, sequence_parallel: bool) -> Tensor:
    """Sum the partial outputs ``[s, b, h]`` of a row-parallel layer over the ranks; differentiable.

    With ``sequence_parallel`` the result is this rank's ``[s/p, b, h]``, in the dtype of ``x``.
    """
    if group_size(group) == 1:
        return x
    result = _ReduceScatter.apply(x, group) if sequence_parallel else _AllReduce.apply(x, group)
    return result  # type: ignore[no-any-return]


def gather_sequence(x: Tensor, group: Any) -> Tensor:
    """Gather ``[s/p, b, h]`` of the ranks, any dtype, to ``[s, b, h]``; differentiable.

    The gradients of all ranks are summed, so what each computes from the result is its own part
    of the loss, as after a column-parallel layer.
    """
    return _AllGather.apply(x, group)  # type: ignore[no-any-return]
