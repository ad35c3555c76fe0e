"""Grouped experts of the local layer spec compute in bf16 only.

``GroupedMLP`` asserts bf16, has a separate branch for ranks without tokens, and computes weight
gradients apart from ``main_grad`` even with gradient accumulation fusion. It is served by
:mod:`mindspeed.te.local_experts` instead.
"""

from __future__ import annotations

from mindspeed.adaptor.patch import Patch
from mindspeed.te import local_experts

OWNER = "repair:grouped-experts"

PATCHES = (
    Patch(
        "megatron.core.transformer.moe.experts:GroupedMLP.forward",
        lambda original: local_experts.grouped_mlp_forward,
        OWNER,
        "grouped experts in any dtype, with fused weight gradients, on ranks without tokens too",
        kind="replace",
        expects="(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs)",
        versions="<0.17",  # later versions have no grouped experts in the local spec
    ),
)
