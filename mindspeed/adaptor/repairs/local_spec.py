"""The local layer spec lacks what the Transformer Engine spec has.

Without Transformer Engine, ``WrappedTorchNorm`` refuses sequence parallelism, persistent layer norm
and zero-centered gamma, and ``DotProductAttention`` refuses packed documents, attention bias and
heads whose key and value sizes differ. The substitute's norm and attention do all of that, so the
local spec is served by the same code (:mod:`mindspeed.te.local_norm`,
:mod:`mindspeed.te.local_attention`).
"""

from __future__ import annotations

from mindspeed.adaptor.patch import Patch
from mindspeed.te import local_attention, local_norm

OWNER = "repair:local-spec"

PATCHES = (
    Patch(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        lambda original: local_norm.new_norm,
        OWNER,
        "a norm with sequence parallelism, persistence and zero-centered gamma",
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
