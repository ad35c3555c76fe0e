"""Defect: image patches see earlier patches only.

Where: ``megatron.core.models.vision.vit_layer_specs.get_vit_layer_with_local_spec`` has a causal
mask; its twin for Transformer Engine has none (Megatron-LM PR 4395).
Symptom: silent, with ``--transformer-impl local``.
Fix: no mask.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:vision-mask"


def remove_mask(original: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap ``get_vit_layer_with_local_spec``."""

    def get_vit_layer_with_local_spec() -> Any:
        from megatron.core.transformer.enums import AttnMaskType

        spec = original()
        spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
        return spec

    return get_vit_layer_with_local_spec


PATCHES = (
    Patch(
        "megatron.core.models.vision.vit_layer_specs:get_vit_layer_with_local_spec",
        remove_mask,
        OWNER,
        "patches of an image see each other",
        expects="()",
    ),
)
