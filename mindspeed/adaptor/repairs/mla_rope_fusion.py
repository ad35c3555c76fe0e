"""Megatron's fused rotary embedding of multi-latent attention consists of CUDA Triton kernels.

The flag is on by default, and elsewhere the first forward pass ends in "'function' object is not
subscriptable". It is switched off where the kernels can't run; the unfused embedding computes the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def corrected_arguments(values: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Megatron's arguments that must change on ``device``: empty, or the flag switched off."""
    wanted = values.get("multi_latent_attention") and values.get("apply_rope_fusion")
    return {"apply_rope_fusion": False} if wanted and device != "cuda" else {}
