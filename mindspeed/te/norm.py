"""``LayerNorm`` and ``RMSNorm`` over the last dimension, with the options Megatron uses.

    LayerNorm  y = (x - mean) / sqrt(var + eps) * w + b
    RMSNorm    y =  x / sqrt(mean(x^2) + eps)   * w

``zero_centered_gamma`` stores ``w - 1``. Statistics and the affine part are computed in fp32 for
16-bit inputs; the output has the dtype of the input, or that of a 16-bit weight (fp32 residuals
enter 16-bit layers). With ``sequence_parallel`` each rank sees part of the tokens, so the
parameters are marked and the trainer sums their gradients over the group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mindspeed.te import kernels
from mindspeed.te.base import TransformerEngineBaseModule


class _Norm(TransformerEngineBaseModule):
    rms = False

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.sequence_parallel = bool(sequence_parallel)
        size = _last_dim(hidden_size if normalized_shape is None else normalized_shape)
        kind = dtype or params_dtype
        one = 0.0 if zero_centered_gamma else 1.0
        self.weight = self.new_vector(size, one, dtype=kind, device=device)
        self.bias: Tensor | None = None
        if not self.rms:
            self.bias = self.new_vector(size, 0.0, dtype=kind, device=device)
        if sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero."""
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, inp: Tensor) -> Tensor:
        """Normalise the last dimension."""
        normed = kernels.normalize(
            inp,
            self.weight,
            self.bias,
            eps=self.eps,
            rms=self.rms,
            zero_centered_gamma=self.zero_centered_gamma,
        )
        return narrowed(normed, self.weight)

    def extra_repr(self) -> str:
        """Return size and eps."""
        return f"{self.weight.numel()}, eps={self.eps}"


def narrowed(normed: Tensor, weight: Tensor) -> Tensor:
    """Return ``normed [..., h]`` in the dtype of its ``weight [h]``, if that has 16 bits."""
    sixteen = weight.dtype.itemsize == 2 and normed.dtype.itemsize > 2
    return normed.to(weight.dtype) if sixteen else normed


def _last_dim(shape: int | Iterable[int] | None) -> int:
    if shape is None:
        raise TypeError("normalized_shape (or hidden_size) is required")
    if isinstance(shape, int):
        return shape
    dims = tuple(shape)
    if len(dims) != 1:
        raise ValueError(f"only the last dimension can be normalised, got the shape {dims}")
    return dims[0]


class LayerNorm(_Norm):
    """LayerNorm with weight and bias."""


class RMSNorm(_Norm):
    rms = True
    bias: Tensor | None = None
