"""The second product of experts: multiply, sum over TP, exchange the tokens back.

Backward in one all-to-all and one all-gather. Source: the operator that CANN calls
BatchMatMulReduceScatterAlltoAll; torch_npu has it no more, so every device runs the composition.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed.ops._check import Check
from mindspeed.ops._expert_exchange import BMM_REDUCE_SCATTER_ALL_TO_ALL
from mindspeed.ops.npu_all_to_all_all_gather_bmm import checked_bias, checked_groups

__all__ = ["npu_bmm_reduce_scatter_all_to_all"]


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
