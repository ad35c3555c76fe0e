"""The products of experts with their exchanges.

    first     exchange tokens, gather them, multiply, activate
    second    multiply, sum over TP, exchange the tokens back

Backward is one all-to-all and one reduce-scatter, or one all-gather. Source: the operators that
CANN calls AlltoAllAllGatherBatchMatMul and BatchMatMulReduceScatterAlltoAll; torch_npu has them no
more, so every device runs the composition.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from mindspeed.ops._check import FLOATS, Check
from mindspeed.ops.compat._activations import PLAIN, Activation
from mindspeed.ops.compat._expert_exchange import (
    ALL_TO_ALL_ALL_GATHER_BMM,
    BMM_REDUCE_SCATTER_ALL_TO_ALL,
)
from mindspeed.ops.process_groups import group_name, resolve

__all__ = ["npu_all_to_all_all_gather_bmm", "npu_bmm_reduce_scatter_all_to_all"]

ACTIVATIONS: Mapping[str, Activation] = {
    "None": lambda x: x,
    "GELU": PLAIN["gelu"],
    "Silu": PLAIN["silu"],
    "FastGELU": PLAIN["fastgelu"],
    "Relu": PLAIN["relu"],
}

Result = tuple[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"]


def npu_all_to_all_all_gather_bmm(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_ep: dist.ProcessGroup | str,
    group_ep_worldsize: int,
    group_tp: dist.ProcessGroup | str,
    group_tp_worldsize: int,
    *,
    bias: torch.Tensor | None = None,
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
        group_ep_worldsize: its number of ranks.
        group_tp: the tensor-parallel group, likewise.
        group_tp_worldsize: its number of ranks.
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
    check = Check("npu_all_to_all_all_gather_bmm")
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
    check: Check,
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
    check: Check, bias: torch.Tensor | None, x: torch.Tensor, experts: int, features: int
) -> None:
    """Require one row of features for each of this rank's experts.

    Args:
        check: with the name of the public function.
        bias: ``[experts, features]`` or ``[experts, 1, features]``, dtype of x or fp32, or None.
        x: any shape, for dtype and device.
        experts: experts of this rank.
        features: columns of their result.
    """
    if bias is None:
        return
    check.dtype((x.dtype, torch.float32) if x.dtype in FLOATS else (x.dtype,), bias=bias)
    check.same("device", x=x, bias=bias)
    shapes = ((experts, features), (experts, 1, features))
    expected = f"shape {shapes[0]} or {shapes[1]}"
    check.require(tuple(bias.shape) in shapes, "bias", expected, tuple(bias.shape))


def npu_bmm_reduce_scatter_all_to_all(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_ep: dist.ProcessGroup | str,
    group_ep_worldsize: int,
    group_tp: dist.ProcessGroup | str,
    group_tp_worldsize: int,
    *,
    bias: torch.Tensor | None = None,
    shard_type: int = 0,
) -> torch.Tensor:
    """Batched product, reduce-scatter over TP, bias, all-to-all over EP.

    Args:
        x: ``[E / ep, ep * C, M / tp]``: fp16, bf16 or fp32.
        weight: ``[E / ep, M / tp, H]``, dtype of x.
        group_ep: the expert-parallel group, its name, or the name of its HCCL communicator.
        group_ep_worldsize: its number of ranks.
        group_tp: the tensor-parallel group, likewise.
        group_tp_worldsize: its number of ranks.
        bias: ``[E / ep, H / tp]`` (shard_type 0) or ``[E / ep, H]`` (1), or the same with a 1
            between; dtype of x or fp32. It is added after the sum over TP.
        shard_type: 0 scatters along H, 1 along C.

    Returns:
        ``[E, C, H / tp]`` (shard_type 0) or ``[E, C / tp, H]`` (1), dtype of x.

    Raises:
        OperatorError: shapes that the groups do not divide, wrong dtypes, options or groups.
    """
    check = Check("npu_bmm_reduce_scatter_all_to_all")
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
