"""Matrix products fused with a collective of the group that `hcom` names."""

from __future__ import annotations

import torch

from tests.npu_emulator.collectives import lent, of_comm
from tests.npu_emulator.reference_ops._common import float_scale, refuse, require


def _plain(op, hcom, world_size, options):
    """The group, once everything that is not restated has been refused."""
    for name in ("comm_mode", "gather_output"):
        options.pop(name, None)
    require(op, options.pop("reduce_op", "sum") == "sum", "reduce_op is sum")
    refuse(op, options)
    group = lent(of_comm(hcom))
    require(op, world_size in (None, group.size()), f"world_size is {group.size()}")
    return group


def npu_mm_all_reduce_base(
    x1, x2, hcom, *, bias=None, x3=None, antiquant_scale=None, antiquant_offset=None,
    dequant_scale=None, antiquant_group_size=0, **options,
):  # fmt: skip
    """``all_reduce(x1 @ x2 + bias + x3)``; x2 or both may be int8."""
    op = "npu_mm_all_reduce_base"
    group = _plain(op, hcom, None, options)
    require(op, x1.numel() and x2.numel(), "x1 and x2 are not empty")
    dtype = x1.dtype
    if dequant_scale is not None:
        require(op, x1.dtype == x2.dtype == torch.int8, "dequant_scale scales int8 products")
        kinds = (torch.int64, torch.bfloat16)
        require(op, dequant_scale.dtype in kinds, "dequant_scale is int64 or bf16")
        dtype = torch.bfloat16 if dequant_scale.dtype == torch.bfloat16 else torch.float16
        y = x1.long() @ x2.long() + (0 if bias is None else bias.long())
        y = y.float() * float_scale(dequant_scale)
    else:
        require(op, x1.dtype in (torch.float16, torch.bfloat16), "x1 is fp16 or bf16")
        if antiquant_scale is not None:
            require(op, x2.dtype == torch.int8, "antiquant_scale scales an int8 x2")
            require(op, antiquant_scale.dtype == x1.dtype, "antiquant_scale has the dtype of x1")
            x2 = _restored(x2, antiquant_scale, antiquant_offset, antiquant_group_size)
        y = x1.float() @ x2.float() + (0 if bias is None else bias.float())
    y = y if x3 is None else y + x3.float()
    group.allreduce(y).wait()
    return y.to(dtype)


def _restored(x2, scale, offset, group_size):
    """``(x2 + offset) * scale``, with one row of scales for ``group_size`` rows of x2."""
    if group_size:
        row = torch.arange(x2.size(0)) // group_size
        scale, offset = scale[row], None if offset is None else offset[row]
    return (x2.float() + (0 if offset is None else offset.float())) * scale.float()


def npu_mm_reduce_scatter_base(input, x2, hcom, world_size, *, bias=None, **options):
    """``reduce_scatter(input @ x2)`` along the rows."""
    op = "npu_mm_reduce_scatter_base"
    group = _plain(op, hcom, world_size, options)
    require(op, bias is None, "bias is not supported by this version")
    require(op, input.size(0) % world_size == 0, "rows are a multiple of world_size")
    y = input.float() @ x2.float()
    part = y.new_empty(y.size(0) // world_size, y.size(1))
    group._reduce_scatter_base(part, y).wait()
    return part.to(input.dtype)


def npu_all_gather_base_mm(
    input, x2, hcom, world_size, *, bias=None, gather_index=0, gather_output=True, **options
):
    """``all_gather(input) @ x2`` and, if requested, the gathered input."""
    op = "npu_all_gather_base_mm"
    group = _plain(op, hcom, world_size, options)
    require(op, bias is None, "bias is not supported by this version")
    require(op, gather_index == 0, "gather_index is 0")
    gathered = input.new_empty(input.size(0) * world_size, input.size(1))
    group._allgather_base(gathered, input.contiguous()).wait()
    y = (gathered.float() @ x2.float()).to(input.dtype)
    return y, gathered if gather_output else torch.empty(0, dtype=input.dtype)


REFERENCE = {
    "npu_mm_all_reduce_base": npu_mm_all_reduce_base,
    "npu_mm_reduce_scatter_base": npu_mm_reduce_scatter_base,
    "npu_all_gather_base_mm": npu_all_gather_base_mm,
}
