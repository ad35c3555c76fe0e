"""Defect: padding of the routing map by a Triton kernel has no other way.

Where: ``megatron.core.fusions.fused_pad_routing_map.fused_pad_routing_map``, called by the token
dispatchers with ``--enable-experimental --moe-permute-fusion`` and
``--moe-router-padding-for-quantization`` (``-for-fp8``).
Symptom: "module 'triton' has no attribute 'language'" or "'function' object is not subscriptable"
in the first forward without CUDA.
Fix: Megatron's own unfused function, which pads the same tokens, of a copy: it writes in place.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed.adaptor.patch import Patch
from mindspeed.device import Device

OWNER = "repair:fused-routing-map"


def needed_on(device: Device, te: str) -> bool:
    """Whether CUDA kernels are missing."""
    return device.name != "cuda"


def _unfused(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def fused_pad_routing_map(routing_map: torch.Tensor, pad_multiple: int) -> torch.Tensor:
        from megatron.core.transformer.moe.moe_utils import pad_routing_map

        return pad_routing_map(routing_map.clone(), pad_multiple)  # type: ignore[no-any-return]

    return fused_pad_routing_map


PATCHES = (
    Patch(
        "megatron.core.fusions.fused_pad_routing_map:fused_pad_routing_map",
        _unfused,
        OWNER,
        "the routing map of fused permutation is padded without a CUDA-only kernel",
        kind="replace",
        expects="(routing_map, pad_multiple)",
    ),
)
