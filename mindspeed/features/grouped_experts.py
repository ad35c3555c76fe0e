"""Grouped experts: Megatron's ``--moe-grouped-gemm``.

The linear layers of all experts of a rank in three launches (forward, two gradients) instead of
three per expert, behind both layer specs; with gradient accumulation fusion the weight gradients of
all experts are added to ``main_grad`` in fp32 by one kernel. Needs no ``grouped_gemm`` package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


@dataclass(frozen=True)
class GroupedExpertsOptions:
    """No flags of our own."""


def _attach(seams: Seams, options: GroupedExpertsOptions, megatron: Megatron) -> None:
    from mindspeed.te import fused_experts

    seams.use_kernels(
        owner=FEATURE.name,
        grouped_matmul=fused_experts.grouped_matmul,
        grouped_wgrad=fused_experts.grouped_wgrad,
        accumulate_grouped_wgrad=fused_experts.accumulate_grouped_wgrad,
    )


FEATURE = Feature(
    name="grouped-experts",
    summary="the linear layers of all experts of a rank in one launch",
    level=1,
    options=GroupedExpertsOptions,
    enabled=lambda options, megatron: bool(megatron.get("moe_grouped_gemm")),
    attach=_attach,
    seams=("kernels",),
)
