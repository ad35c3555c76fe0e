"""Matrix multiplications that Megatron calls by the names of extensions.

* ``wgrad_gemm_accum_fp32`` and ``_fp16`` add a weight gradient into ``main_grad`` (gradient
  accumulation fusion), for Megatron's own linear layers: the module
  ``fused_weight_gradient_mlp_cuda``.
* :func:`general_gemm` is the multiplication of the MoE router, with an output dtype.

A low-precision gradient is multiplied in the precision of ``main_grad``: summing rounded products
into an fp32 buffer would lose the precision that the buffer is for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed.te import kernels


def wgrad_gemm_accum_fp32(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """Add ``grad^T x`` of ``[..., in]`` and ``[..., out]`` to an fp32 ``main_grad [out, in]``."""
    kernels.accumulate_wgrad(_flat(x), _flat(grad), main_grad)


def wgrad_gemm_accum_fp16(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """Add ``grad^T x`` of ``[..., in]`` and ``[..., out]`` to a 16-bit ``main_grad [out, in]``."""
    kernels.accumulate_wgrad(_flat(x), _flat(grad), main_grad)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def general_gemm(
    a: Tensor,
    b: Tensor,
    workspace: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    accumulate: bool = False,
    grad: bool = False,
    **unused: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """Return ``(op(b) @ op(a), bias gradient, None, None)`` in ``out_dtype``.

    The layout names the transposition of ``a`` and then ``b`` in the column-major terms of BLAS.
    In row-major terms:

        TN   b [m, k] @ a^T [k, n]   ->  [m, n]      forward
        NN   b [m, n] @ a [n, k]     ->  [m, k]      input gradient
        NT   b^T [n, m] @ a [m, k]   ->  [n, k]      weight gradient

    Args:
        workspace: Not read.
        out_dtype: Dtype of the result; that of ``a`` by default.
        layout: ``"TN"``, ``"NN"`` or ``"NT"``.
        out: Result of the same shape, written or added to; its dtype stays.
        bias: ``[n]``, added; with ``grad`` it only requests the bias gradient.
        accumulate: Add to ``out``.
        grad: Return the sum of ``b`` over its rows, ``[n]``, as bias gradient if ``bias`` is given.
        **unused: fp8 and userbuffers options, which must be None.
    """
    if any(unused.get(name) is not None for name in ("quantization_params", "ub", "gelu_in")):
        raise NotImplementedError(
            "general_gemm: fp8 outputs, userbuffers and fused GELU are not available "
            "(--fp8-format and --tp-comm-overlap must stay off)"
        )
    if layout not in ("TN", "NN", "NT"):
        raise ValueError(f"general_gemm: layout {layout!r} is not one of TN, NN, NT")
    dtype = out_dtype or a.dtype
    a, b = a.to(dtype), b.to(dtype)
    left = b.t() if layout[1] == "T" else b
    right = a.t() if layout[0] == "T" else a
    if bias is not None and not grad:  # in one rounding: product and bias may cancel
        result = torch.addmm(bias.to(dtype), left, right)
    else:
        result = left @ right
    if out is not None:
        result = out.add_(result) if accumulate else out.copy_(result)
    bias_grad = b.sum(0) if grad and bias is not None else None
    return result, bias_grad, None, None
