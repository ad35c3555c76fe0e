"""Defect: the fused activation of experts clamps before it adds the bias.

Where: ``weighted_bias_quick_geglu_impl`` of ``megatron.core.fusions.fused_bias_geglu``, with
``--activation-func-clamp-value`` and a bias (experts that are not grouped).
Symptom: silent; outputs and gradients are those of another model than without
``--bias-gelu-fusion``, and than gpt-oss, which clamps the sum.
Fix: the bias is added first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import repair

NEEDED_WITH = ("activation_func_clamp_value",)


def add_bias_first(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``weighted_bias_quick_geglu_impl``."""

    def weighted_bias_quick_geglu_impl(
        input: torch.Tensor,
        bias: torch.Tensor | None,
        weights: torch.Tensor,
        fp8_input_store: bool = False,
        linear_offset: float = 0.0,
        clamp_value: float | None = None,
    ) -> torch.Tensor:
        if bias is not None and clamp_value is not None:
            input, bias = input + bias, None
        return original(input, bias, weights, fp8_input_store, linear_offset, clamp_value)

    return weighted_bias_quick_geglu_impl


PATCHES: tuple[Any, ...] = (
    repair(
        "megatron.core.fusions.fused_bias_geglu:weighted_bias_quick_geglu_impl",
        add_bias_first,
        "the fused activation of experts clamps the sum of output and bias",
        expects="(input, bias, weights, fp8_input_store, linear_offset, clamp_value)",
        versions=">=0.15",
    ),
)
