"""The local layer spec lacks what the Transformer Engine spec has.

Without Transformer Engine, ``WrappedTorchNorm`` refuses sequence parallelism, persistent layer norm
and zero-centered gamma, and ``DotProductAttention`` refuses packed documents, attention bias and
heads whose key and value sizes differ. The substitute's norm and attention do all of that, so the
local spec is served by the same code (:mod:`mindspeed.te.local`).
"""

from __future__ import annotations

from mindspeed.adaptor.patch import Patch
from mindspeed.te import local

OWNER = "repair:local-spec"
_ATTENTION = "megatron.core.transformer.dot_product_attention:DotProductAttention"

PATCHES = (
    Patch(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        lambda original: local.new_norm,
        OWNER,
        "a norm with sequence parallelism, persistence and zero-centered gamma",
        kind="replace",
        expects="(cls, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, ...)",
    ),
    Patch(
        f"{_ATTENTION}.__init__",
        local.accept_head_sizes,
        OWNER,
        "key and value heads of different sizes",
        expects="(self, config, layer_number, attn_mask_type, attention_type, ...)",
    ),
    Patch(
        f"{_ATTENTION}.forward",
        lambda original: local.core_attention_forward,
        OWNER,
        "packed documents and attention bias",
        kind="replace",
        expects="(self, query, key, value, attention_mask, attn_mask_type, ...)",
    ),
)
