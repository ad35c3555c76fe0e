"""Defect: grouped experts of the local layer spec compute in bf16 only.

Where: ``megatron.core.transformer.moe.experts.GroupedMLP.forward`` asserts bf16, has a separate
branch for ranks without tokens, and computes weight gradients outside ``main_grad`` even with
gradient accumulation fusion.
Symptom: an AssertionError with fp32 or fp16; weight gradients that are not fused.
Fix: the forward is replaced by :mod:`mindspeed.te.grouped_gemm`.
Versions: <0.17; later ones have no grouped experts in the local spec.
"""

from __future__ import annotations

from mindspeed.adaptor.patch import repair
from mindspeed.te import grouped_gemm

NEEDED_WITH = ("moe_grouped_gemm",)

PATCHES = (
    repair(
        "megatron.core.transformer.moe.experts:GroupedMLP.forward",
        lambda original: grouped_gemm.grouped_mlp_forward,
        "grouped experts in any dtype, with fused weight gradients, also on ranks without tokens",
        kind="replace",
        expects="(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs)",
        versions="<0.17",  # later versions have no grouped experts in the local spec
    ),
)
