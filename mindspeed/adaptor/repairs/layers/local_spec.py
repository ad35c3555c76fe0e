"""Defect: the local layer spec lacks features that the Transformer Engine spec has.

Where: ``megatron.core.transformer.torch_norm.WrappedTorchNorm`` and
``megatron.core.transformer.dot_product_attention.DotProductAttention``.
Symptom: the norm asserts that sequence parallelism, persistent layer norm and zero-centered gamma
are off; the attention refuses packed sequences, attention bias, and key and value heads of
different sizes.
Fix: both are served by the code of the Transformer Engine substitute
(:mod:`mindspeed.te.local_norm`, :mod:`mindspeed.te.local_attention`).
"""

from __future__ import annotations

from mindspeed.adaptor.patch import repair
from mindspeed.device import Device
from mindspeed.te import local_attention, local_norm


def needed_on(device: Device, te: str) -> bool:
    """Whether the substitute serves both layer specs."""
    return te == "substitute"


PATCHES = (
    repair(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        lambda original: local_norm.new_norm,
        "a norm with sequence parallelism, persistent layer norm and zero-centered gamma",
        kind="replace",
        expects="(cls, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, ...)",
    ),
    repair(
        "megatron.core.transformer.dot_product_attention:DotProductAttention",
        lambda original: local_attention.with_substitutes(original),
        "packed documents, attention bias, key and value heads of different sizes",
    ),
)
