"""The end of a row-parallel linear in inference: product, all-reduce, residual, RMSNorm.

    y = all_reduce(x1 @ x2 + bias) + residual
    norm_out = y / sqrt(mean(y^2) + epsilon) * gamma

Source: the operator of the same name in CANN. torch_npu has it no more, so the product with its
all-reduce is one fused kernel there and the norm another.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed.ops._check import Check
from mindspeed.ops._mm_all_reduce import MM_ALL_REDUCE, checked_arguments
from mindspeed.ops.rms_norm import rms_norm

__all__ = ["npu_mm_all_reduce_add_rms_norm"]


def npu_mm_all_reduce_add_rms_norm(
    x1: torch.Tensor,
    x2: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    hcom: dist.ProcessGroup | str,
    reduce_op: str = "sum",
    epsilon: float = 1e-06,
    bias: torch.Tensor | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    dequant_scale: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply, sum over the group, add the residual and normalise.

    Args:
        x1: ``[b, s, k]`` or ``[s, k]``: fp16, bf16, fp32, or int8 with ``dequant_scale``.
        x2: ``[k, n]``, also as the transposed view of ``[n, k]``: dtype of x1, or int8 with
            ``antiquant_scale``.
        residual: ``[b, s, n]`` or, where x1 has two dimensions, any shape of s rows of n; dtype of
            the output.
        gamma: ``[n]``, dtype of residual or fp32.
        hcom: the group, its name, or the name of its HCCL communicator; each rank holds a slice
            of k.
        reduce_op: "sum".
        epsilon: added to the mean square.
        bias: ``[n]``; it is inside the sum over ranks: pass it on one rank, or bias / W on each.
        antiquant_scale: scale of an int8 x2, for the whole (``[1]``), by column (``[n]``) or by
            rows (``[ceil(k / antiquant_group_size), n]``): ``(x2 + offset) * scale``.
        antiquant_offset: as antiquant_scale.
        dequant_scale: scale of the int8 product, ``[1]`` or ``[n]``: bf16 for a bf16 output, fp32
            or int64 (as npu_trans_quant_param makes it) for fp16.
        antiquant_group_size: rows of x2 that share a scale, or 0.
        comm_turn: 0.

    Returns:
        y and norm_out, both with the shape and dtype of residual.

    Raises:
        OperatorError: wrong dtypes, shapes or options, an unknown group, a gradient is required.
    """
    operands = checked_arguments(
        Check("npu_mm_all_reduce_add_rms_norm"), x1, x2, residual, gamma, hcom, reduce_op, epsilon,
        bias, antiquant_scale, antiquant_offset, dequant_scale, antiquant_group_size, comm_turn,
    )  # fmt: skip
    product = MM_ALL_REDUCE(*operands).view_as(residual)
    y = product.add_(residual)
    return y, rms_norm(y, gamma, epsilon)
