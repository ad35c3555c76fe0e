"""The twin of :mod:`mindspeed.ops.npu_mm_all_reduce_add_rms_norm` that works in its residual."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed.ops._check import Check
from mindspeed.ops._mm_all_reduce import MM_ALL_REDUCE, checked_arguments
from mindspeed.ops.rms_norm import rms_norm

__all__ = ["npu_mm_all_reduce_add_rms_norm_"]


def npu_mm_all_reduce_add_rms_norm_(
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
    """Multiply, sum over the group, add to the residual in place, and normalise.

    Arguments and errors are those of
    :func:`~mindspeed.ops.npu_mm_all_reduce_add_rms_norm.npu_mm_all_reduce_add_rms_norm`: x1
    ``[b, s, k]`` or ``[s, k]``, x2 ``[k, n]``, residual ``[b, s, n]``, gamma ``[n]``.

    Returns:
        ``residual`` itself, which now holds y, and norm_out, both with its shape and dtype.
    """
    operands = checked_arguments(
        Check("npu_mm_all_reduce_add_rms_norm_"), x1, x2, residual, gamma, hcom, reduce_op, epsilon,
        bias, antiquant_scale, antiquant_offset, dequant_scale, antiquant_group_size, comm_turn,
    )  # fmt: skip
    product = MM_ALL_REDUCE(*operands).view_as(residual)
    residual.add_(product)
    return residual, rms_norm(residual, gamma, epsilon)
