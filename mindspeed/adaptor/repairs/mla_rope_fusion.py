"""Megatron's fused rotary embedding of multi-latent attention consists of CUDA Triton kernels.

The flag is on by default in Megatron-LM, and elsewhere the first forward pass ends in "'function'
object is not subscriptable". It is switched off where the kernels cannot run, in Megatron's
arguments and in configurations that were made without; the unfused embedding computes the same,
also in inference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind

OWNER = "repair:mla-rope-fusion"


def corrected_arguments(values: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Megatron's arguments that must change on ``device``: empty, or the flag switched off."""
    wanted = values.get("multi_latent_attention") and values.get("apply_rope_fusion")
    return {"apply_rope_fusion": False} if wanted and device != "cuda" else {}


def without_fused_rope(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``MLASelfAttention.__init__``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bind(original, (self, *args), kwargs)["config"].apply_rope_fusion = False
        original(self, *args, **kwargs)

    return __init__


PATCHES = (
    Patch(
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__",
        without_fused_rope,
        OWNER,
        "latent attention without CUDA's fused rotary embedding",
        expects="(self, config, submodules, layer_number, attn_mask_type, ...)",
    ),
)
