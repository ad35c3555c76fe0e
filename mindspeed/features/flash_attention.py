"""Flash attention: ``--use-flash-attn``.

The core attention of both layer specs by one operator that never has the ``[b, h, s, s]`` scores,
masks or probabilities in memory, not for the backward either: it keeps q, k, v, the output and 4
bytes per query and head. Causal masks, windows, linear biases and packed documents are rules and
cost only the pairs that they let meet. Same losses. Worth it always.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mindspeed.features.feature import Feature, Megatron
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


@dataclass(frozen=True)
class FlashAttentionOptions:
    """Whether core attention is one operator."""

    use_flash_attn: bool = flag(False, "core attention as one operator", megatron=True)
    use_fusion_attn_v2: bool = flag(False, "same; the version with position biases on NPU")
    shape_order: Literal["SBH", "BSH", "BSND"] = flag(
        "SBH", "without effect: tensors are taken in the order they have"
    )


def _enabled(options: FlashAttentionOptions, megatron: Megatron) -> bool:
    alibi = megatron.get("position_embedding_type") == "alibi"
    in_kernel = alibi and megatron.get("alibi_fusion_attn_type") in (2, 3)
    return options.use_flash_attn or options.use_fusion_attn_v2 or in_kernel


def _attach(seams: Seams, options: FlashAttentionOptions, megatron: Megatron) -> None:
    from mindspeed.te import flash

    seams.use_kernels(owner=FEATURE.name, attend=flash.attend, attend_packed=flash.attend_packed)


FEATURE = Feature(
    name="flash-attention",
    summary="core attention as one operator, forward and backward",
    level=1,
    options=FlashAttentionOptions,
    enabled=_enabled,
    attach=_attach,
    seams=("kernels",),
)
