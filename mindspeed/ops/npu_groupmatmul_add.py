"""Weight gradients of grouped experts added in place: ``grad[g] += x[g]^T @ dy[g]``.

The grouped form of :mod:`mindspeed.ops.npu_matmul_add`: products of 16-bit numbers stay in fp32
until they are in the buffer. On CUDA one kernel reads the cumulative group sizes on the device, so
nothing waits for the host, and no ``[E, K, N]`` gradient is ever stored in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._check import ArgumentCheck
from mindspeed.ops._numerics import WORKLOAD_ROWS, accumulation_dtype, product_flops, random
from mindspeed.ops.grouped_matmul import cumulative, sample_ends
from mindspeed.ops.npu_matmul_add import MATMUL_ADD
from mindspeed.ops.registry import Operator, torch_npu, triton

__all__ = ["npu_groupmatmul_add_fp32"]

_check = ArgumentCheck("npu_groupmatmul_add_fp32")


def npu_groupmatmul_add_fp32(x: Tensor, dy: Tensor, grouplist: Tensor, grad: Tensor) -> None:
    """Add each group's ``x[g]^T @ dy[g]`` to its part of the fp32 buffer ``grad``, in place.

    Args:
        x: ``[T, K]``, fp32, bf16 or fp16, rows sorted by group.
        dy: ``[T, N]``, same dtype.
        grouplist: ``[E]`` int64, row after the last of each group (cumulative sums of the sizes).
        grad: fp32, contiguous, viewed as ``[E, K, N]``. Empty groups stay as they are.

    Raises:
        OperatorError: wrong dtype, shape or memory layout; cumulative sizes that decrease or do not
            end at T (checked where reading them is free); an argument that requires a gradient.
    """
    _check.tensor(grad=grad)
    _check.floating(x=x, dy=dy)
    _check.dtype((torch.float32,), grad=grad)
    _check.same("device", x=x, grad=grad)
    _check.rank(2, x=x, dy=dy)
    _check.shape((x.shape[0], dy.shape[1]), dy=dy)
    _check.rank(1, grouplist=grouplist)
    shape = (grouplist.shape[0], x.shape[1], dy.shape[1])
    elements = shape[0] * shape[1] * shape[2]
    _check.require(
        grad.numel() == elements, "grad", f"{elements} elements, viewed as {shape}", grad.shape
    )
    _check.require(grad.is_contiguous(), "grad", "a contiguous tensor", f"strides {grad.stride()}")
    _check.forward_only(x=x, dy=dy, grad=grad)
    ends = cumulative(_check, "grouplist", grouplist, x)
    GROUPMATMUL_ADD(x, dy, ends, grad.view(shape))


def _reference(x: Tensor, dy: Tensor, ends: Tensor, grad: Tensor) -> None:
    start = 0
    for total, end in zip(grad, ends.tolist(), strict=True):
        MATMUL_ADD.reference(dy[start:end], x[start:end], total)
        start = end


def _npu(x: Tensor, dy: Tensor, ends: Tensor, grad: Tensor) -> None:
    if grad.dtype != torch.float32 or x.dtype.itemsize != 2:
        _reference(x, dy, ends, grad)
    elif x.shape[0]:
        # group_list_type is ignored where the op falls back, so cumulative sums it is.
        torch.ops.npu.npu_grouped_matmul_add_(
            grad, x.contiguous(), dy.contiguous(), ends, transpose_x=True, group_type=2
        )


def _fake(x: Tensor, dy: Tensor, ends: Tensor, grad: Tensor) -> None:
    return None


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    wide = accumulation_dtype(torch.empty(0, dtype=dtype))
    for sizes, inner, outer in (
        ((3, 0, 5), 8, 4),
        ((70, 1, 33, 0), 20, 36),
        ((0, 0), 4, 3),
        ((7,), 1, 1),
    ):
        rows = sum(sizes)
        x, dy = random((rows, inner), dtype), random((rows, outer), dtype, seed=1)
        yield x, dy, sample_ends(sizes), random((len(sizes), inner, outer), wide, seed=2)
        yield x, dy, sample_ends(sizes), random((len(sizes), inner, outer), dtype, seed=3)
    x, dy = random((8, 6), dtype).t(), random((5, 6), dtype, seed=1).t()
    yield x, dy, sample_ends((2, 4)), random((2, 8, 5), wide, seed=2)


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x = torch.ones(WORKLOAD_ROWS, hidden, dtype=dtype, device=device)
    dy = torch.ones(WORKLOAD_ROWS, 1024, dtype=dtype, device=device)
    ends = torch.arange(1, 9, device=device) * (WORKLOAD_ROWS // 8)
    return x, dy, ends, torch.zeros(8, hidden, 1024, dtype=torch.float32, device=device)


GROUPMATMUL_ADD = Operator(
    "groupmatmul_add(Tensor x, Tensor dy, Tensor ends, Tensor(a!) grad) -> ()",
    reference=_reference,
    fake=_fake,
    cuda=[triton("groupmatmul_add:accumulate")],
    npu=[
        torch_npu(
            _npu,
            "npu_grouped_matmul_add_",
            note="the plain formula runs for fp32 operands, and a grad that is not fp32",
        )
    ],
    flops=product_flops,
    samples=_samples,
    workload=_workload,
    public="mindspeed.ops.npu_groupmatmul_add.npu_groupmatmul_add_fp32",
)
