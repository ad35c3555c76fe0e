"""Norms of the local layer spec, with Megatron's options.

Megatron's own norm for ``--transformer-impl local`` refuses sequence parallelism, persistent layer
norm and zero-centered gamma. These keep its parameter names and compute through
``kernels.normalize``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed.errors import ConfigError
from mindspeed.te import kernels
from mindspeed.te.norm import narrowed


class _Affine:
    """Zero-centered gamma and the sequence-parallel mark, which torch's norms lack."""

    weight: torch.nn.Parameter
    zero_centered_gamma = False

    def _mark(self, zero_centered_gamma: bool, sequence_parallel: bool) -> None:
        self.zero_centered_gamma = zero_centered_gamma
        if zero_centered_gamma:
            torch.nn.init.zeros_(self.weight)
        for parameter in self.parameters():  # type: ignore[attr-defined]
            parameter.sequence_parallel = sequence_parallel


class LayerNorm(_Affine, torch.nn.LayerNorm):
    """torch's LayerNorm with Megatron's options."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x [..., h]``; the dtype is that of ``narrowed``."""
        normed = kernels.normalize(
            x,
            self.weight,
            self.bias,
            eps=self.eps,
            rms=False,
            zero_centered_gamma=self.zero_centered_gamma,
        )
        return narrowed(normed, self.weight)


class RMSNorm(_Affine, torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's options."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x [..., h]``; the dtype is that of ``narrowed``."""
        normed = kernels.normalize(
            x,
            self.weight,
            None,
            eps=self.eps,  # type: ignore[arg-type]
            rms=True,
            zero_centered_gamma=self.zero_centered_gamma,
        )
        return narrowed(normed, self.weight)


def new_norm(
    cls: type,
    config: Any,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
) -> torch.nn.Module:
    """Build the norm of ``config.normalization``; stands in for ``WrappedTorchNorm.__new__``.

    Args:
        config: Megatron's transformer configuration, which decides.
        persist_layer_norm: Without effect: there is one kernel.
        zero_centered_gamma: Not read; ``config.layernorm_zero_centered_gamma`` is.
        normalization: Not read; ``config.normalization`` is.
    """
    if config.memory_efficient_layer_norm:
        raise ConfigError(
            "--memory-efficient-layer-norm is not available with --transformer-impl local; use "
            "--recompute-granularity selective --recompute-modules layernorm"
        )
    kinds = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if config.normalization not in kinds:
        raise ConfigError(f"--normalization {config.normalization} is not one of {list(kinds)}")
    norm = kinds[config.normalization](hidden_size, eps=eps)
    norm._mark(config.layernorm_zero_centered_gamma, config.sequence_parallel)
    return norm
