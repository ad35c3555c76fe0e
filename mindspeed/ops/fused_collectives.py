"""Fused kernels of :mod:`mindspeed.ops.compat.lcal_functional`, and their limits.

torch_npu's kernels take 16-bit matrices with an inner length in [256, 65535) and 2, 4, 8 or 16
ranks; on Atlas A2 all fused kernels of a model must use one communicator. torch's kernels for
symmetric memory take bf16 or fp16 on GPUs that can read each other's memory; torch sets that
memory up at the first call. :func:`why_not_fused` says which of these keeps a product from them.
As kernels of the operators they leave everything else to the chunks of ``overlap``, and say so
once.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.ops import overlap
from mindspeed.ops.process_groups import comm_name, resolve
from mindspeed.ops.registry import (
    Implementation,
    Kernel,
    note_fallback,
    plain_torch,
    torch_npu,
)

_log = logging.getLogger("mindspeed")
_HALVES = (torch.float16, torch.bfloat16)
_NPU_NOTE = (
    "the plain formula runs for fp32, inner lengths outside of [256, 65535), other numbers of "
    "ranks than 2, 4, 8 and 16, and empty matrices"
)


def matmul_all_reduce(
    a: Tensor, b: Tensor, group: dist.ProcessGroup, comm_mode: str | None = None
) -> Tensor:
    """Sum over ranks of ``a @ b``, ``[m, n]``, by one kernel of an NPU.

    Args:
        a: ``[m, k]``, fp16 or bf16.
        b: ``[k, n]``, dtype of a.
        comm_mode: how the NPU communicates: None, ``ai_cpu``, or ``aiv`` (its vector cores write
            into the memory of the other ranks).
    """
    fused = torch.ops.npu.npu_mm_all_reduce_base
    return fused(a, b, comm_name(group), **_mode(fused, comm_mode))


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, group: dist.ProcessGroup, comm_mode: str | None = None
) -> Tensor:
    """This rank's rows of the sum over ranks of ``a @ b``, ``[m / p, n]``, by one kernel.

    Args:
        a: ``[m, k]``, fp16 or bf16, on an NPU or a GPU.
        b: ``[k, n]``, dtype of a.
        comm_mode: as in :func:`matmul_all_reduce`; NPU only.
    """
    if a.device.type != "npu":
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        return fused(a, b, "sum", 0, group.group_name)
    fused = torch.ops.npu.npu_mm_reduce_scatter_base
    return fused(a, b, comm_name(group), group.size(), **_mode(fused, comm_mode))


def all_gather_matmul(
    a: Tensor, b: Tensor, group: dist.ProcessGroup, keep: bool, comm_mode: str | None = None
) -> tuple[Tensor, Tensor | None]:
    """``(a of all ranks) @ b``, ``[m, n]``, and a of all ranks, ``[m, k]``, by one kernel.

    Args:
        a: ``[m / p, k]``, fp16 or bf16, on an NPU or a GPU.
        b: ``[k, n]``, dtype of a.
        keep: the gathered rows are needed; without it they are None.
        comm_mode: as in :func:`matmul_all_reduce`; NPU only.
    """
    if a.device.type != "npu":
        gather = torch.ops.symm_mem.fused_all_gather_matmul
        gathered, (product,) = gather(a, [b], 0, group.group_name, return_A=keep)
    else:
        gather = torch.ops.npu.npu_all_gather_base_mm
        name, ranks = comm_name(group), group.size()
        mode = _mode(gather, comm_mode)
        product, gathered = gather(a, b, name, ranks, gather_output=keep, **mode)
    return product, gathered if keep else None


@functools.cache
def _mode(fused: Any, comm_mode: str | None) -> dict[str, str]:
    """The argument of a kernel that sets its mode; older torch_npu has the default mode alone."""
    if comm_mode is None:
        return {}
    if any(argument.name == "comm_mode" for argument in fused.default._schema.arguments):
        return {"comm_mode": comm_mode}
    _log.warning("this torch_npu's %s has no mode %r, only its default", fused, comm_mode)
    return {}


def why_not_fused(operator: str, a: Tensor, group: dist.ProcessGroup) -> str | None:
    """Why no fused kernel computes an operator with this left matrix, or None.

    Args:
        operator: its name, such as ``coc_matmul_all_reduce``.
        a: ``[m, k]``, any dtype, on the device that computes.
    """
    device = a.device.type
    kernels = {"npu": NPU, "cuda": SYMMETRIC_MEMORY}.get(device)
    if kernels is None:
        return f"there are no fused kernels for tensors on {device}"
    if operator not in kernels:
        return "torch has no kernel that fuses a product with an all-reduce"
    if refused := kernels[operator].refused():
        return refused
    return _npu_unfit(a, group) if device == "npu" else _symmetric_unfit(a, group)


def _npu_unfit(a: Tensor, group: dist.ProcessGroup) -> str | None:
    """Why torch_npu's fused kernels do not take these operands, or None."""
    if a.dtype not in _HALVES:
        return f"its fused kernels take fp16 and bf16, not {a.dtype}"
    if not 256 <= a.size(1) < 65535:
        return f"its fused kernels need an inner length in [256, 65535), this is {a.size(1)}"
    if group.size() not in (2, 4, 8, 16):
        return f"its fused kernels need 2, 4, 8 or 16 ranks, these are {group.size()}"
    return None if a.numel() else "its fused kernels take no empty matrix"


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


def _symmetric_unfit(a: Tensor, group: dist.ProcessGroup) -> str | None:
    if a.dtype not in _HALVES:
        return f"the fused kernels over symmetric memory take fp16 and bf16, not {a.dtype}"
    on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
    ranks = dist.get_process_group_ranks(group)
    if len({rank // on_machine for rank in ranks}) > 1:
        return "the group spans machines, which share no memory"
    return None if a.numel() else "the fused kernels over symmetric memory take no empty matrix"


def _kernels(unfit: Callable[[Tensor, dist.ProcessGroup], str | None]) -> dict[str, Kernel]:
    """The operators' kernels: fused where ``unfit`` has no objection, else in chunks."""

    def fits(name: str, a: Tensor, group: dist.ProcessGroup) -> bool:
        why = unfit(a, group)
        if why:
            note_fallback(f"coc_ops.{name}", why)
        return not why

    def all_reduce(a: Tensor, b: Tensor, output: Tensor, chunks: int, group: str) -> None:
        ranks = resolve(group)
        if fits("matmul_all_reduce", a, ranks):
            output.copy_(matmul_all_reduce(a, b, ranks))
        else:
            overlap.matmul_all_reduce(a, b, output, ranks, chunks)

    def reduce_scatter(a: Tensor, b: Tensor, output: Tensor, chunks: int, group: str) -> None:
        ranks = resolve(group)
        if fits("matmul_reduce_scatter", a, ranks):
            output.copy_(matmul_reduce_scatter(a, b, ranks))
        else:
            overlap.matmul_reduce_scatter(a, b, output, ranks, chunks)

    def gather_into(
        a: Tensor, b: Tensor, output: Tensor, comm_output: Tensor | None, chunks: int, group: str
    ) -> None:
        ranks = resolve(group)
        if not fits("all_gather_matmul", a, ranks):
            return overlap.all_gather_matmul(a, b, output, comm_output, ranks, chunks)
        product, gathered = all_gather_matmul(a, b, ranks, comm_output is not None)
        output.copy_(product)
        if comm_output is not None and gathered is not None:
            comm_output.copy_(gathered)

    def gather(a: Tensor, b: Tensor, output: Tensor, chunks: int, group: str) -> None:
        gather_into(a, b, output, None, chunks, group)

    return {
        "coc_matmul_all_reduce": all_reduce,
        "coc_matmul_reduce_scatter": reduce_scatter,
        "coc_all_gather_matmul": gather,
        "coc_all_gather_matmul_v2": gather_into,
    }


_NPU_NAMES = {
    "coc_matmul_all_reduce": "npu_mm_all_reduce_base",
    "coc_matmul_reduce_scatter": "npu_mm_reduce_scatter_base",
    "coc_all_gather_matmul": "npu_all_gather_base_mm",
    "coc_all_gather_matmul_v2": "npu_all_gather_base_mm",
}
NPU: dict[str, Implementation] = {
    name: torch_npu(kernel, _NPU_NAMES[name], note=_NPU_NOTE)
    for name, kernel in _kernels(_npu_unfit).items()
}
SYMMETRIC_MEMORY: dict[str, Implementation] = {
    name: plain_torch(kernel, _no_symmetric_memory)
    for name, kernel in _kernels(_symmetric_unfit).items()
    if name != "coc_matmul_all_reduce"
}
