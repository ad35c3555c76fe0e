"""The local layer spec lacks what the Transformer Engine spec has.

Without Transformer Engine, ``WrappedTorchNorm`` refuses sequence parallelism, persistent layer norm
and zero-centered gamma, and ``DotProductAttention`` refuses packed documents, attention bias and
heads whose key and value sizes differ, and ``GroupedMLP`` refuses everything but bf16. The
substitute's norm, attention and grouped products do all of that, so the local spec is served by the
same code (:mod:`mindspeed.te.local`, :mod:`mindspeed.te.local_experts`).
"""

from __future__ import annotations

from mindspeed.adaptor.patch import Patch
from mindspeed.te import local, local_experts

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
    Patch(
        "megatron.core.transformer.moe.experts:GroupedMLP.forward",
        lambda original: local_experts.grouped_mlp_forward,
        OWNER,
        "grouped experts in any dtype, with fused weight gradients, on ranks without tokens too",
        kind="replace",
        expects="(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs)",
        versions="<0.17",  # afterwards the local spec has no grouped experts of its own
    ),
)
