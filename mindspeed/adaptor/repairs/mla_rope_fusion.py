"""Megatron's fused rotary embedding of multi-latent attention consists of CUDA Triton kernels.

The flag is on by default in Megatron-LM, and elsewhere the first forward pass ends in "'function'
object is not subscriptable". A configuration of latent attention has it off where the kernels
cannot run; the unfused embedding computes the same, also in inference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:mla-rope-fusion"


def without_fused_rope(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``MLATransformerConfig.__post_init__``."""

    def __post_init__(self: Any) -> None:
        self.apply_rope_fusion = False
        original(self)

    return __post_init__


PATCHES = (
    Patch(
        "megatron.core.transformer.transformer_config:MLATransformerConfig.__post_init__",
        without_fused_rope,
        OWNER,
        "latent attention without CUDA's fused rotary embedding",
        expects="(self)",
    ),
)
