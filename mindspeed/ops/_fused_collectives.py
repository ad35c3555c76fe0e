"""Fused kernels of :mod:`mindspeed.ops.lcal_functional`, and their limits.

torch_npu's kernels take 16-bit matrices with an inner length in [256, 65535) and 2, 4, 8 or 16
ranks; on Atlas A2 all fused kernels of a model must use one communicator. torch's kernels for
symmetric memory take bf16 or fp16 on GPUs that can read each other's memory; torch sets that
memory up at the first call. Everything else goes through the chunks of ``_overlap``, and says so
once.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist

from mindspeed.ops import _overlap
from mindspeed.ops._process_groups import comm_name, resolve
from mindspeed.ops._registry import Implementation, note_fallback, plain_torch, torch_npu

_HALVES = (torch.float16, torch.bfloat16)


_NPU_NOTE = (
    "the plain formula runs for fp32, inner lengths outside of [256, 65535), other numbers of "
    "ranks than 2, 4, 8 and 16, and empty matrices"
)


def _npu_unfit(a: torch.Tensor, ranks: int) -> str | None:
    """Why torch_npu's fused kernels do not take these operands, or None."""
    if a.dtype not in _HALVES:
        return f"its fused kernels take fp16 and bf16, not {a.dtype}"
    if not 256 <= a.size(1) < 65535:
        return f"its fused kernels need an inner length in [256, 65535), this is {a.size(1)}"
    if ranks not in (2, 4, 8, 16):
        return f"its fused kernels need 2, 4, 8 or 16 ranks, these are {ranks}"
    return None if a.numel() else "its fused kernels take no empty matrix"


def _npu_all_reduce(
    a: torch.Tensor, b: torch.Tensor, output: torch.Tensor, chunks: int, group: str
) -> None:
    ranks = resolve(group)
    if why := _npu_unfit(a, ranks.size()):
        note_fallback("coc_ops.matmul_all_reduce", why)
        return _overlap.matmul_all_reduce(a, b, output, ranks, chunks)
    output.copy_(torch.ops.npu.npu_mm_all_reduce_base(a, b, comm_name(ranks)))


def _npu_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, output: torch.Tensor, chunks: int, group: str
) -> None:
    ranks = resolve(group)
    if why := _npu_unfit(a, ranks.size()):
        note_fallback("coc_ops.matmul_reduce_scatter", why)
        return _overlap.matmul_reduce_scatter(a, b, output, ranks, chunks)
    fused = torch.ops.npu.npu_mm_reduce_scatter_base
    output.copy_(fused(a, b, comm_name(ranks), ranks.size()))


def _npu_gather(
    a: torch.Tensor, b: torch.Tensor, output: torch.Tensor, chunks: int, group: str
) -> None:
    _npu_gather_into(a, b, output, None, chunks, group)


def _npu_gather_into(
    a: torch.Tensor,
    b: torch.Tensor,
    output: torch.Tensor,
    comm_output: torch.Tensor | None,
    chunks: int,
    group: str,
) -> None:
    ranks = resolve(group)
    if why := _npu_unfit(a, ranks.size()):
        note_fallback("coc_ops.all_gather_matmul", why)
        return _overlap.all_gather_matmul(a, b, output, comm_output, ranks, chunks)
    product, gathered = torch.ops.npu.npu_all_gather_base_mm(
        a, b, comm_name(ranks), ranks.size(), gather_output=comm_output is not None
    )
    output.copy_(product)
    if comm_output is not None:
        comm_output.copy_(gathered)


@functools.cache
def _no_symmetric_memory() -> str | None:
    """Why torch's fused kernels over symmetric memory cannot run in this process, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not hasattr(torch.ops.symm_mem, "fused_all_gather_matmul"):
        return "this torch has no fused kernels over symmetric memory"
    if torch.version.hip:
        return "the fused kernels over symmetric memory are for NVIDIA GPUs"
    count = torch.cuda.device_count()
    here = torch.cuda.current_device()
    others = [i for i in range(count) if i != here]
    if not others or not all(torch.cuda.can_device_access_peer(here, i) for i in others):
        return f"the {count} GPUs of this machine do not all read each other's memory"
    return None


def _symmetric_unfit(a: torch.Tensor, group: str) -> str | None:
    if a.dtype not in _HALVES:
        return f"the fused kernels over symmetric memory take fp16 and bf16, not {a.dtype}"
    on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
    ranks = dist.get_process_group_ranks(resolve(group))
    if len({rank // on_machine for rank in ranks}) > 1:
        return "the group spans machines, which share no memory"
    return None if a.numel() else "the fused kernels over symmetric memory take no empty matrix"


def _symmetric_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, output: torch.Tensor, chunks: int, group: str
) -> None:
    if why := _symmetric_unfit(a, group):
        note_fallback("coc_ops.matmul_reduce_scatter", why)
        return _overlap.matmul_reduce_scatter(a, b, output, resolve(group), chunks)
    output.copy_(torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group))


def _symmetric_gather(
    a: torch.Tensor, b: torch.Tensor, output: torch.Tensor, chunks: int, group: str
) -> None:
    _symmetric_gather_into(a, b, output, None, chunks, group)


def _symmetric_gather_into(
    a: torch.Tensor,
    b: torch.Tensor,
    output: torch.Tensor,
    comm_output: torch.Tensor | None,
    chunks: int,
    group: str,
) -> None:
    if why := _symmetric_unfit(a, group):
        note_fallback("coc_ops.all_gather_matmul", why)
        return _overlap.all_gather_matmul(a, b, output, comm_output, resolve(group), chunks)
    gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
        a, [b], 0, group, return_A=comm_output is not None
    )
    output.copy_(product)
    if comm_output is not None:
        comm_output.copy_(gathered)


NPU: dict[str, Implementation] = {
    "coc_matmul_all_reduce": torch_npu(_npu_all_reduce, "npu_mm_all_reduce_base", note=_NPU_NOTE),
    "coc_matmul_reduce_scatter": torch_npu(
        _npu_reduce_scatter, "npu_mm_reduce_scatter_base", note=_NPU_NOTE
    ),
    "coc_all_gather_matmul": torch_npu(_npu_gather, "npu_all_gather_base_mm", note=_NPU_NOTE),
    "coc_all_gather_matmul_v2": torch_npu(
        _npu_gather_into, "npu_all_gather_base_mm", note=_NPU_NOTE
    ),
}
SYMMETRIC_MEMORY: dict[str, Implementation] = {
    "coc_matmul_reduce_scatter": plain_torch(_symmetric_reduce_scatter, _no_symmetric_memory),
    "coc_all_gather_matmul": plain_torch(_symmetric_gather, _no_symmetric_memory),
    "coc_all_gather_matmul_v2": plain_torch(_symmetric_gather_into, _no_symmetric_memory),
}
