"""Matrix products fused with a collective of the group that `hcom` names."""

from __future__ import annotations

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from npu_emulator.collectives import lent
from npu_emulator.reference_ops._common import refuse, require


def _plain(op, hcom, world_size, options):
    """The group, once everything that is not restated has been refused."""
    for name in ("comm_mode", "gather_output"):
        options.pop(name, None)
    require(op, options.pop("reduce_op", "sum") == "sum", "reduce_op is sum")
    refuse(op, options)
    group = lent(_resolve_process_group(hcom))
    require(op, world_size in (None, group.size()), f"world_size is {group.size()}")
    return group


def npu_mm_all_reduce_base(x1, x2, hcom, *, bias=None, x3=None, **options):
    """``all_reduce(x1 @ x2 + bias + x3)``."""
    group = _plain("npu_mm_all_reduce_base", hcom, None, options)
    y = x1.float() @ x2.float()
    for term in (bias, x3):
        y = y if term is None else y + term.float()
    group.allreduce(y).wait()
    return y.to(x1.dtype)


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
    """``all_gather(input) @ x2`` and, if it is asked for, the gathered input."""
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
