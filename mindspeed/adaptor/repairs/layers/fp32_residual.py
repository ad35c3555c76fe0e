"""Defect: fp32 residual connections are rounded to 16 bits in every layer.

Where: ``megatron.core.fusions.fused_bias_dropout._bias_dropout_add_func`` casts the residual to the
dtype of the layer's output (Megatron-LM PR 3504); pipeline stages receive the hidden states in the
dtype of the parameters.
Symptom: silent; only the embedding is in fp32, so ``--fp32-residual-connection`` has next to no
effect. The local layer spec stops at the first linear layer, as its norm keeps fp32.
Fix: the output is added in the dtype of the residual, a layer starts from an fp32 residual
(multi-token prediction would not) and stages exchange fp32. The norms of
:mod:`mindspeed.te` return the dtype of their weight, as the native ones do.
Versions: <0.17.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import repair

NEEDED_WITH = ("fp32_residual_connection",)
_VERSIONS = "<0.17"


def add_in_dtype_of_residual(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_bias_dropout_add_func``."""

    def _bias_dropout_add_func(x_with_bias: Any, residual: Any, prob: Any, training: Any) -> Any:
        x, bias = x_with_bias
        if x.dtype != residual.dtype:
            x = x.to(residual.dtype)
            bias = None if bias is None else bias.to(residual.dtype)
        return original((x, bias), residual, prob, training)

    return _bias_dropout_add_func


def start_from_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TransformerLayer._forward_attention``, which begins a layer."""

    def _forward_attention(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.fp32_residual_connection:
            hidden_states = hidden_states.float()
        return original(self, hidden_states, *args, **kwargs)

    return _forward_attention


def exchange_fp32(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``TransformerConfig.__post_init__``."""

    def __post_init__(self: Any) -> None:
        if self.fp32_residual_connection and self.pipeline_dtype is not None:
            self.pipeline_dtype = torch.float32
        original(self)

    return __post_init__


PATCHES = (
    repair(
        "megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func",
        add_in_dtype_of_residual,
        "an fp32 residual stays in fp32",
        expects="(x_with_bias, residual, prob, training)",
        versions=_VERSIONS,
    ),
    repair(
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention",
        start_from_fp32,
        "each layer starts from an fp32 residual",
        expects="(self, hidden_states, ...)",
        versions=_VERSIONS,
    ),
    repair(
        "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
        exchange_fp32,
        "pipeline stages exchange fp32 residuals",
        expects="(self)",
        versions=_VERSIONS,
    ),
)
