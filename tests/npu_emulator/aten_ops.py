"""aten operators that torch_npu has and torch's CPU has not, on CPU tensors."""

from __future__ import annotations

import torch


def mm(self: torch.Tensor, mat2: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Products of 16-bit matrices, accumulated and returned in `out_dtype`."""
    return self.to(out_dtype) @ mat2.to(out_dtype)


def addmm(
    self: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """``beta * self + alpha * mat1 @ mat2``; works for baddbmm, too."""
    return beta * self.to(out_dtype) + alpha * mm(mat1, mat2, out_dtype)


def matmul_backward(
    grad: torch.Tensor, self: torch.Tensor, other: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of ``torch.matmul``, by formula: kernels run below autograd."""
    left, right = torch.atleast_2d(self), other if other.dim() > 1 else other[:, None]
    grad = grad if other.dim() > 1 else grad[..., None]
    grad = grad if self.dim() > 1 else grad.unsqueeze(-2)
    return (
        (grad @ right.mT).sum_to_size(left.shape).reshape(self.shape) if mask[0] else None,
        (left.mT @ grad).sum_to_size(right.shape).reshape(other.shape) if mask[1] else None,
    )


def _out(compute):
    def kernel(*args, out: torch.Tensor, **kwargs) -> torch.Tensor:
        result = compute(*args, **kwargs)
        return out.resize_(result.shape).copy_(result)

    return kernel


REFERENCE = {
    "aten::mm.dtype": mm,
    "aten::mm.dtype_out": _out(mm),
    "aten::bmm.dtype": mm,
    "aten::bmm.dtype_out": _out(mm),
    "aten::addmm.dtype": addmm,
    "aten::addmm.dtype_out": _out(addmm),
    "aten::baddbmm.dtype": addmm,
    "aten::baddbmm.dtype_out": _out(addmm),
    "aten::matmul_backward": matmul_backward,
}
