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

Source: the operators that CANN calls AlltoAllAllGatherBatchMatMul and
BatchMatMulReduceScatterAlltoAll; torch_npu has them no more, so every device runs the composition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.ops._check import FLOATS, ArgumentCheck
from mindspeed.ops.compat._activations import PLAIN, Activation
from mindspeed.ops.process_groups import group_name, resolve
from mindspeed.ops.registry import Operator

__all__ = ["npu_all_to_all_all_gather_bmm", "npu_bmm_reduce_scatter_all_to_all"]

# [tp, ep, E', rows, columns] <-> [E', ep, rows, tp, columns] or [E', ep, tp, rows, columns]
_TO_EXPERTS = {0: (2, 1, 3, 0, 4), 1: (2, 1, 0, 3, 4)}
_FROM_EXPERTS = {0: (3, 1, 0, 2, 4), 1: (2, 1, 0, 3, 4)}


def _gather_bmm(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_ep: str, group_tp: str, shard_type: int
) -> tuple[Tensor, Tensor]:
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
    x: Tensor, weight: Tensor, bias: Tensor | None, group_ep: str, group_tp: str, shard_type: int
) -> Tensor:
    ep, tp = resolve(group_ep), resolve(group_tp)
    partial = _by_source(torch.bmm(x, weight), ep.size(), tp.size(), shard_type)
    partial = partial.permute(_FROM_EXPERTS[shard_type]).contiguous()
    part = partial[0]
    if tp.size() > 1:
        part = torch.empty_like(part)
        dist.reduce_scatter_tensor(part, partial.flatten(0, 1), group=tp)
    part = _add_bias(part, None if bias is None else bias.view(bias.size(0), 1, -1))
    return _all_to_all(part.flatten(0, 1), ep)


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return x
    arrived = torch.empty_like(x)
    dist.all_to_all_single(arrived, x, group=group)
    return arrived


def _by_source(x: Tensor, ep: int, tp: int, shard_type: int) -> Tensor:
    """``[E', ep C, H]`` with the dimensions that the collectives tell apart."""
    local, rows, columns = x.shape
    if shard_type == 0:
        return x.view(local, ep, rows // ep, tp, columns // tp)
    return x.view(local, ep, tp, rows // (ep * tp), columns)


def _add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return y
    return (y + bias).to(y.dtype)  # the bias of 16-bit products may be fp32


def _fake_gather_bmm(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _, group_ep, group_tp, shard_type = rest
    rows = resolve(group_ep).size() * x.size(1)
    if shard_type == 1:
        rows = rows * resolve(group_tp).size()
    local, hidden, inner = weight.shape
    return x.new_empty(local, rows, inner), x.new_empty(local, rows, hidden)


def _fake_bmm_scatter(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    _, group_ep, group_tp, shard_type = rest
    ep, tp = resolve(group_ep).size(), resolve(group_tp).size()
    rows, columns = x.size(1) // ep, weight.size(2)
    shape = (rows, columns // tp) if shard_type == 0 else (rows // tp, columns)
    return x.new_empty(x.size(0) * ep, *shape)


def _save_gather_bmm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, bias, *ctx.groups = inputs
    # The weight's gradient needs the gathered tokens; without it they need not be kept.
    ctx.save_for_backward(weight, output[1] if ctx.needs_input_grad[1] else None)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_gather_bmm(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
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


def _save_bmm_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.groups = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)


def _backward_bmm_scatter(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
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


ACTIVATIONS: Mapping[str, Activation] = {
    "None": lambda x: x,
    "GELU": PLAIN["gelu"],
    "Silu": PLAIN["silu"],
    "FastGELU": PLAIN["fastgelu"],
    "Relu": PLAIN["relu"],
}

Result = tuple[Tensor, "Tensor | None", "Tensor | None"]


def npu_all_to_all_all_gather_bmm(
    x: Tensor,
    weight: Tensor,
    group_ep: dist.ProcessGroup | str,
    group_ep_worldsize: int,
    group_tp: dist.ProcessGroup | str,
    group_tp_worldsize: int,
    *,
    bias: Tensor | None = None,
    shard_type: int = 0,
    act_type: str = "None",
    need_allgather_out: bool = False,
    need_activation_feature: bool = False,
) -> Result:
    """All-to-all over EP, all-gather over TP, batched product, bias, activation.

    Args:
        x: ``[E, C, H / tp]`` (shard_type 0) or ``[E, C / tp, H]`` (1): fp16, bf16 or fp32.
        weight: ``[E / ep, H, M / tp]``, dtype of x.
        group_ep: the expert-parallel group, its name, or the name of its HCCL communicator.
        group_tp: the tensor-parallel group, likewise.
        bias: ``[E / ep, M / tp]`` or ``[E / ep, 1, M / tp]``, dtype of x or fp32.
        shard_type: 0 gathers along H, 1 along C.
        act_type: "None", "GELU", "Silu", "FastGELU" or "Relu".
        need_allgather_out: whether to return the gathered tokens.
        need_activation_feature: whether to return what the activation was given.

    Returns:
        y1 ``[E / ep, ep * C, M / tp]``; the gathered tokens ``[E / ep, ep * C, H]``, which carry no
        gradient, or None; the input of the activation, or None.

    Raises:
        OperatorError: shapes that the groups do not divide, wrong dtypes, options or groups.
    """
    check = ArgumentCheck("npu_all_to_all_all_gather_bmm")
    check.choice(tuple(ACTIVATIONS), act_type=act_type)
    names = checked_groups(check, group_ep, group_ep_worldsize, group_tp, group_tp_worldsize)
    check.choice((0, 1), shard_type=shard_type)
    check.rank(3, x=x, weight=weight)
    check.floating(x=x, weight=weight)
    experts = weight.size(0) * group_ep_worldsize
    expected = f"{experts} experts, those of weight times group_ep_worldsize"
    check.require(x.size(0) == experts, "x", expected, tuple(x.shape))
    hidden = x.size(2) * (group_tp_worldsize if shard_type == 0 else 1)
    expected = f"{hidden} rows an expert, the hidden size of x"
    check.require(weight.size(1) == hidden, "weight", expected, tuple(weight.shape))
    checked_bias(check, bias, x, weight.size(0), weight.size(2))
    if bias is not None:
        bias = bias.view(weight.size(0), 1, -1)
    before, gathered = ALL_TO_ALL_ALL_GATHER_BMM(x, weight, bias, *names, shard_type)
    y = ACTIVATIONS[act_type](before)
    return y, gathered if need_allgather_out else None, before if need_activation_feature else None


def checked_groups(
    check: ArgumentCheck,
    group_ep: dist.ProcessGroup | str,
    group_ep_worldsize: int,
    group_tp: dist.ProcessGroup | str,
    group_tp_worldsize: int,
) -> tuple[str, str]:
    """The torch names of two different groups of the stated sizes."""
    names = group_name(check, group_ep=group_ep), group_name(check, group_tp=group_tp)
    sizes = resolve(names[0]).size(), resolve(names[1]).size()
    for argument, stated, size in zip(
        ("group_ep_worldsize", "group_tp_worldsize"),
        (group_ep_worldsize, group_tp_worldsize),
        sizes,
        strict=True,
    ):
        check.require(stated == size, argument, f"the {size} ranks of the group", stated)
    different = names[0] != names[1] or sizes[0] == 1
    check.require(different, "group_tp", "another group than group_ep", names[1])
    return names


def checked_bias(
    check: ArgumentCheck, bias: Tensor | None, x: Tensor, experts: int, features: int
) -> None:
    """Require ``[experts, features]`` or ``[experts, 1, features]`` in the dtype of x or fp32."""
    if bias is None:
        return
    check.dtype((x.dtype, torch.float32) if x.dtype in FLOATS else (x.dtype,), bias=bias)
    check.same("device", x=x, bias=bias)
    shapes = ((experts, features), (experts, 1, features))
    expected = f"shape {shapes[0]} or {shapes[1]}"
    check.require(tuple(bias.shape) in shapes, "bias", expected, tuple(bias.shape))


def npu_bmm_reduce_scatter_all_to_all(
    x: Tensor,
    weight: Tensor,
    group_ep: dist.ProcessGroup | str,
    group_ep_worldsize: int,
    group_tp: dist.ProcessGroup | str,
    group_tp_worldsize: int,
    *,
    bias: Tensor | None = None,
    shard_type: int = 0,
) -> Tensor:
    """Batched product, reduce-scatter over TP, bias, all-to-all over EP.

    Args:
        x: ``[E / ep, ep * C, M / tp]``: fp16, bf16 or fp32.
        weight: ``[E / ep, M / tp, H]``, dtype of x.
        group_ep: the expert-parallel group, its name, or the name of its HCCL communicator.
        group_tp: the tensor-parallel group, likewise.
        bias: ``[E / ep, H / tp]`` (shard_type 0) or ``[E / ep, H]`` (1), or the same with a 1
            between; dtype of x or fp32. It is added after the sum over TP.
        shard_type: 0 scatters along H, 1 along C.

    Returns:
        ``[E, C, H / tp]`` (shard_type 0) or ``[E, C / tp, H]`` (1), dtype of x.

    Raises:
        OperatorError: shapes that the groups do not divide, wrong dtypes, options or groups.
    """
    check = ArgumentCheck("npu_bmm_reduce_scatter_all_to_all")
    names = checked_groups(check, group_ep, group_ep_worldsize, group_tp, group_tp_worldsize)
    check.choice((0, 1), shard_type=shard_type)
    check.rank(3, x=x, weight=weight)
    check.floating(x=x, weight=weight)
    fits = x.size(0) == weight.size(0) and x.size(2) == weight.size(1)
    expected = f"shape ({x.size(0)}, {x.size(2)}, H), from the shape of x"
    check.require(fits, "weight", expected, tuple(weight.shape))
    rows, hidden = x.size(1), weight.size(2)
    divisor = group_ep_worldsize * (group_tp_worldsize if shard_type == 1 else 1)
    expected = f"a number of rows that {divisor} divides"
    check.require(rows % divisor == 0, "x", expected, tuple(x.shape))
    if shard_type == 0:
        expected = f"a hidden size that {group_tp_worldsize} divides"
        check.require(hidden % group_tp_worldsize == 0, "weight", expected, tuple(weight.shape))
        hidden //= group_tp_worldsize
    checked_bias(check, bias, x, weight.size(0), hidden)
    return BMM_REDUCE_SCATTER_ALL_TO_ALL(x, weight, bias, *names, shard_type)
