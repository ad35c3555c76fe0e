"""Defects without CUDA: kernels that are launched or compiled on every device.

Defect: the fused rotary embedding of multi-latent attention exists for CUDA only.

Where: ``megatron.core.transformer.multi_latent_attention.MLASelfAttention`` with
``apply_rope_fusion``, which is on by default in Megatron-LM and launches Triton kernels.
Symptom: "'function' object is not subscriptable" in the first forward on other devices.
Fix: switch ``apply_rope_fusion`` off, in Megatron's arguments and in configurations built without
them. The unfused embedding computes the same values, in inference too.

Defect: padding of the routing map by a Triton kernel has no other way.

Where: ``megatron.core.fusions.fused_pad_routing_map.fused_pad_routing_map``, called by the token
dispatchers with ``--enable-experimental --moe-permute-fusion`` and
``--moe-router-padding-for-quantization`` (``-for-fp8``).
Symptom: "module 'triton' has no attribute 'language'" or "'function' object is not subscriptable"
in the first forward without CUDA.
Fix: Megatron's own unfused function, which pads the same tokens, of a copy: it writes in place.

Defect: Megatron-LM compiles its legacy fused CUDA kernels on every device.

Where: ``megatron.legacy.fused_kernels.load``, called first by ``initialize_megatron``, runs
``nvcc`` to read its version.
Symptom: an exception in every training script on a machine without CUDA.
Fix: ``load`` compiles nothing; no code of megatron.core uses these kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind
from mindspeed.device import Device


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


def _unfused(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def fused_pad_routing_map(routing_map: torch.Tensor, pad_multiple: int) -> torch.Tensor:
        from megatron.core.transformer.moe.moe_utils import pad_routing_map

        return pad_routing_map(routing_map.clone(), pad_multiple)  # type: ignore[no-any-return]

    return fused_pad_routing_map


def skip_compilation(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Replace ``load`` by a function that compiles nothing."""

    def load(args: Any) -> None:
        del args

    return load


PATCHES = (
    repair(
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__",
        disable_rope_fusion,
        "MLA without the CUDA-only fused rotary embedding",
        expects="(self, config, submodules, layer_number, attn_mask_type, ...)",
    ),
    repair(
        "megatron.core.fusions.fused_pad_routing_map:fused_pad_routing_map",
        _unfused,
        "the routing map of fused permutation is padded without a CUDA-only kernel",
        kind="replace",
        expects="(routing_map, pad_multiple)",
        versions=">=0.15",
    ),
    repair(
        "megatron.legacy.fused_kernels:load",
        skip_compilation,
        "no CUDA kernels are compiled on this device",
        kind="replace",
        expects="(args)",
    ),
)
