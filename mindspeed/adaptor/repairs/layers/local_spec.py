"""Defect: the local layer spec lacks features that the Transformer Engine spec has.

Where: ``megatron.core.transformer.torch_norm.WrappedTorchNorm`` and
``megatron.core.transformer.dot_product_attention.DotProductAttention``.
Symptom: the norm asserts that sequence parallelism, persistent layer norm and zero-centered gamma
are off; the attention refuses packed sequences, attention bias, and key and value heads of
different sizes.
Fix: both are served by the code of the Transformer Engine substitute
(:mod:`mindspeed.te.local_norm`, :mod:`mindspeed.te.local_attention`).
Versions: all.
"""

from __future__ import annotations

from mindspeed.adaptor.patch import Patch
from mindspeed.device import Device
from mindspeed.te import local_attention, local_norm

OWNER = "repair:local-spec"


def needed_on(device: Device, te: str) -> bool:
    """Whether the substitute serves both layer specs."""
    return te == "substitute"


PATCHES = (
    Patch(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        lambda original: local_norm.new_norm,
        OWNER,
        "a norm with sequence parallelism, persistent layer norm and zero-centered gamma",
        kind="replace",
        expects="(cls, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, ...)",
    ),
    Patch(
        "megatron.core.transformer.dot_product_attention:DotProductAttention",
        local_attention.with_substitutes,
        OWNER,
        "packed documents, attention bias, key and value heads of different sizes",
    ),
)
