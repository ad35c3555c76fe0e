"""Experts' batched product between their two exchanges, and its mirror image.

    all_to_all_all_gather_bmm        tokens --EP all-to-all--> --TP all-gather--> bmm
    bmm_reduce_scatter_all_to_all    bmm --TP reduce-scatter--> --EP all-to-all--> tokens

Each is the other's backward with respect to its tokens. Shapes, with E experts, capacity C, H
hidden and M inner features, over groups of ep and tp ranks (E' = E / ep on each rank):

==================  =============================  ===============================
tensor              shard_type 0                   shard_type 1
==================  =============================  ===============================
tokens              ``[E, C, H / tp]``             ``[E, C / tp, H]``
gathered            ``[E', ep C, H]``              ``[E', ep C, H]``
weight (first)      ``[E', H, M / tp]``            ``[E', H, M / tp]``
weight (second)     ``[E', M / tp, H]``            ``[E', M / tp, H]``
==================  =============================  ===============================

Rows of ``gathered`` are ordered by the EP rank they came from, then as they were there. An
all-to-all over EP and a collective over TP, each of the tokens' bytes: E C H / tp elements in, and
for the all-gather as many sent. A group of one rank sends nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.ops.process_groups import resolve
from mindspeed.ops.registry import Operator

__all__ = ["ALL_TO_ALL_ALL_GATHER_BMM", "BMM_REDUCE_SCATTER_ALL_TO_ALL"]

# [tp, ep, E', rows, columns] <-> [E', ep, rows, tp, columns] or [E', ep, tp, rows, columns]
_TO_EXPERTS = {0: (2, 1, 3, 0, 4), 1: (2, 1, 0, 3, 4)}
_FROM_EXPERTS = {0: (3, 1, 0, 2, 4), 1: (2, 1, 0, 3, 4)}


def _gather_bmm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group_ep: str,
    group_tp: str,
    shard_type: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    ep, tp = resolve(group_ep), resolve(group_tp)
    local, (_, rows, columns) = weight.size(0), x.shape
    arrived = _all_to_all(x.contiguous(), ep)
    if tp.size() > 1:
        parts = x.new_empty(tp.size() * x.size(0), *x.shape[1:])
        dist.all_gather_into_tensor(parts, arrived, group=tp)
    else:
        parts = arrived.clone() if arrived is x else arrived
    parts = parts.view(tp.size(), ep.size(), local, rows, columns)
    gathered = parts.permute(_TO_EXPERTS[shard_type]).reshape(local, -1, weight.size(1))
    if bias is not None and bias.dtype == x.dtype:
        return torch.baddbmm(bias, gathered, weight), gathered
    return _add_bias(torch.bmm(gathered, weight), bias), gathered


def _bmm_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group_ep: str,
    group_tp: str,
    shard_type: int,
) -> torch.Tensor:
    ep, tp = resolve(group_ep), resolve(group_tp)
    partial = _by_source(torch.bmm(x, weight), ep.size(), tp.size(), shard_type)
    partial = partial.permute(_FROM_EXPERTS[shard_type]).contiguous()
    part = partial[0]
    if tp.size() > 1:
        part = torch.empty_like(part)
        dist.reduce_scatter_tensor(part, partial.flatten(0, 1), group=tp)
    part = _add_bias(part, None if bias is None else bias.view(bias.size(0), 1, -1))
    return _all_to_all(part.flatten(0, 1), ep)


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() == 1:
        return x
    arrived = torch.empty_like(x)
    dist.all_to_all_single(arrived, x, group=group)
    return arrived


def _by_source(x: torch.Tensor, ep: int, tp: int, shard_type: int) -> torch.Tensor:
    """``[E', ep C, H]`` with the dimensions that the collectives tell apart."""
    local, rows, columns = x.shape
    if shard_type == 0:
        return x.view(local, ep, rows // ep, tp, columns // tp)
    return x.view(local, ep, tp, rows // (ep * tp), columns)


def _add_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        return y
    return (y + bias).to(y.dtype)  # the bias of 16-bit products may be fp32


def _fake_gather_bmm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group_ep: str,
    group_tp: str,
    shard_type: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = resolve(group_ep).size() * x.size(1)
    if shard_type == 1:
        rows = rows * resolve(group_tp).size()
    local, hidden, inner = weight.shape
    return x.new_empty(local, rows, inner), x.new_empty(local, rows, hidden)


def _fake_bmm_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group_ep: str,
    group_tp: str,
    shard_type: int,
) -> torch.Tensor:
    ep, tp = resolve(group_ep).size(), resolve(group_tp).size()
    rows, columns = x.size(1) // ep, weight.size(2)
    shape = (rows, columns // tp) if shard_type == 0 else (rows // tp, columns)
    return x.new_empty(x.size(0) * ep, *shape)


def _save_gather_bmm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, weight, bias, *ctx.groups = inputs
    # The weight's gradient needs the gathered tokens; without it they need not be kept.
    ctx.save_for_backward(weight, output[1] if ctx.needs_input_grad[1] else None)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_gather_bmm(
    ctx: Any, dy: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    weight, gathered = ctx.saved_tensors
    dx = dweight = dbias = None
    if dy is not None:
        if ctx.needs_input_grad[0]:
            dx = BMM_REDUCE_SCATTER_ALL_TO_ALL(dy, weight.transpose(1, 2), None, *ctx.groups)
        if ctx.needs_input_grad[1]:
            dweight = torch.bmm(gathered.transpose(1, 2), dy)
        if ctx.needs_input_grad[2]:
            dbias = dy.sum(1, dtype=ctx.bias[1]).view(ctx.bias[0])
    return dx, dweight, dbias, None, None, None


def _save_bmm_scatter(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, *ctx.groups = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)


def _backward_bmm_scatter(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx, gathered = ALL_TO_ALL_ALL_GATHER_BMM(dy, weight.transpose(1, 2), None, *ctx.groups)
    dweight = torch.bmm(x.transpose(1, 2), gathered) if ctx.needs_input_grad[1] else None
    dbias = None
    if ctx.needs_input_grad[2]:
        group_ep, group_tp, shard_type = ctx.groups
        tp = resolve(group_tp)
        by_source = _by_source(gathered, resolve(group_ep).size(), tp.size(), shard_type)
        own = by_source.select(3 if shard_type == 0 else 2, tp.rank())
        dbias = own.sum((1, 2), dtype=ctx.bias[1]).view(ctx.bias[0])
    return dx, dweight, dbias, None, None, None


def _flops_gather(
    x_shape: tuple[int, ...], weight_shape: tuple[int, ...], *_: Any, out_shape: Any
) -> int:
    local, rows, inner = out_shape[0]
    return 2 * local * rows * weight_shape[1] * inner


def _flops_scatter(
    x_shape: tuple[int, ...], weight_shape: tuple[int, ...], *_: Any, **__: Any
) -> int:
    return 2 * math.prod(x_shape) * weight_shape[2]


_ARGUMENTS = "Tensor x, Tensor weight, Tensor? bias, str group_ep, str group_tp, int shard_type"

BMM_REDUCE_SCATTER_ALL_TO_ALL = Operator(
    f"bmm_reduce_scatter_all_to_all({_ARGUMENTS}) -> Tensor",
    reference=_bmm_scatter,
    fake=_fake_bmm_scatter,
    autograd=(_save_bmm_scatter, _backward_bmm_scatter),
    flops=_flops_scatter,
    samples=lambda dtype: (),  # without groups there is nothing to run
    public="mindspeed.ops.npu_bmm_reduce_scatter_all_to_all.npu_bmm_reduce_scatter_all_to_all",
)

ALL_TO_ALL_ALL_GATHER_BMM = Operator(
    f"all_to_all_all_gather_bmm({_ARGUMENTS}) -> (Tensor, Tensor)",
    reference=_gather_bmm,
    fake=_fake_gather_bmm,
    autograd=(_save_gather_bmm, _backward_gather_bmm),
    flops=_flops_gather,
    samples=lambda dtype: (),  # without groups there is nothing to run
    public="mindspeed.ops.npu_all_to_all_all_gather_bmm.npu_all_to_all_all_gather_bmm",
)
