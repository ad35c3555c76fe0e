"""Grouped experts: Megatron's ``--moe-grouped-gemm``.

The linear layers of all experts of a rank in three launches (forward, two gradients) instead of
three per expert, in both layer specs; with gradient accumulation fusion the weight gradients of
all experts are added to ``main_grad`` in fp32 by one kernel. Needs no ``grouped_gemm`` package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class GroupedExperts(Feature, level=1, seams=("kernels",)):
    """The linear layers of all experts of a rank in one launch."""

    gemm_gradient_accumulation_fusion: bool = flag(
        False, "weight gradients of grouped experts go into main_grad (they do when dense ones do)"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.gemm_gradient_accumulation_fusion or bool(megatron.get("moe_grouped_gemm"))

    def problems(self, megatron: Megatron) -> list[Problem]:
        if not self.gemm_gradient_accumulation_fusion:
            return []
        name, needed = "--gemm-gradient-accumulation-fusion", []
        if not megatron.get("moe_grouped_gemm"):
            needed.append(Problem(name, "the experts are not grouped", "add --moe-grouped-gemm"))
        if not megatron.get("gradient_accumulation_fusion"):
            fix = "remove --no-gradient-accumulation-fusion"
            needed.append(Problem(name, "gradient accumulation fusion is off", fix))
        return needed

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.te import fused_experts

        seams.use_kernels(
            owner=self.name,
            grouped_matmul=fused_experts.grouped_matmul,
            grouped_wgrad=fused_experts.grouped_wgrad,
            accumulate_grouped_wgrad=fused_experts.accumulate_grouped_wgrad,
        )
