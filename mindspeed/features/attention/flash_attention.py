"""Flash attention: ``--use-flash-attn``.

The core attention of both layer specs by one operator that never has the ``[b, h, s, s]`` scores,
masks or probabilities in memory, not for the backward either: it keeps q, k, v, the output and 4
bytes per query and head. Causal masks, windows, linear biases and packed documents are rules and
cost only the pairs that they let meet. Same losses. Worth it always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mindspeed.features.feature import Feature, Megatron, Option
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class FlashAttention(
    Feature,
    level=1,
    seams=("kernels",),
    options=(
        Option(
            "memory",
            "flash-attention",
            {"use_flash_attn": True},
            "attention is one operator that keeps no scores",
            faster=True,
            kept=True,
        ),
    ),
):
    """Core attention as one operator, forward and backward."""

    use_flash_attn: bool = flag(False, "core attention as one operator", megatron=True)
    use_fusion_attn_v2: bool = flag(False, "same; the version with position biases on NPU")
    shape_order: Literal["SBH", "BSH", "BSND"] = flag(
        "SBH", "without effect: tensors are taken in the order they have"
    )

    def enabled(self, megatron: Megatron) -> bool:
        alibi = megatron.get("position_embedding_type") == "alibi"
        in_kernel = alibi and megatron.get("alibi_fusion_attn_type") in (2, 3)
        return self.use_flash_attn or self.use_fusion_attn_v2 or in_kernel

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.te import flash, kernels

        seams.use_kernels(
            owner=self.name,
            attend=flash.attend,
            attend_packed=flash.attend_packed,
            attend_by_plan=kernels.attend_by_plan,  # its blocks are this operator's, flag or not
        )
