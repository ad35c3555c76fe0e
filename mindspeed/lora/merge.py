"""Adapters into weights: ``W += (alpha / r) B A`` in fp32, then cast to the weight's type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mindspeed.lora.attach import adapted_layers, bare
from mindspeed.lora.linear import take_adapter


@torch.no_grad()
def merge(chunks: Iterable[Any]) -> None:
    """Add every adapter to its layer's weight and remove it; the model is a plain one again.

    Each rank merges its slices, nothing is communicated. The parameters stay frozen. Taking the
    adapter out again is exact only in fp32.

    Args:
        chunks: This rank's pipeline stages, wrapped for precision or not.
    """
    for chunk in bare(chunks):
        for _, layer in adapted_layers(chunk):
            weight: Any = layer.weight  # type: ignore[attr-defined]
            if weight is None:
                weight = chunk.shared_embedding_or_output_weight()
            weight.copy_(weight.float() + layer.delta())
            take_adapter(layer)
        if hasattr(chunk, "lora_config"):
            del chunk.lora_config
