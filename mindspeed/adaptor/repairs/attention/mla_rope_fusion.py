"""Defect: the fused rotary embedding of multi-latent attention exists for CUDA only.

Where: ``megatron.core.transformer.multi_latent_attention.MLASelfAttention`` with
``apply_rope_fusion``, which is on by default in Megatron-LM and launches Triton kernels.
Symptom: "'function' object is not subscriptable" in the first forward on other devices.
Fix: switch ``apply_rope_fusion`` off, in Megatron's arguments and in configurations built without
them. The unfused embedding computes the same values, in inference too.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind
from mindspeed.device import Device

OWNER = "repair:mla-rope-fusion"


def needed_on(device: Device, te: str) -> bool:
    """Whether CUDA kernels are missing."""
    return device.name != "cuda"


def corrected_arguments(values: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Megatron's arguments that must change on ``device``: empty, or the flag switched off."""
    wanted = values.get("multi_latent_attention") and values.get("apply_rope_fusion")
    return {"apply_rope_fusion": False} if wanted and device != "cuda" else {}


def disable_rope_fusion(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``MLASelfAttention.__init__``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bind(original, (self, *args), kwargs)["config"].apply_rope_fusion = False
        original(self, *args, **kwargs)

    return __init__


PATCHES = (
    Patch(
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__",
        disable_rope_fusion,
        OWNER,
        "MLA without the CUDA-only fused rotary embedding",
        expects="(self, config, submodules, layer_number, attn_mask_type, ...)",
    ),
)
