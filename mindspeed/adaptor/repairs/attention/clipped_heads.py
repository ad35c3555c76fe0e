"""Defect: clipping of attention logits turns heads whose logits are all negative into NaN.

Where: ``clip_qk`` of ``SelfAttention`` and ``MLASelfAttention`` divides the threshold by the
largest logit of each head and takes a power of it, of heads below the threshold, too; where that
logit is negative so is the quotient (Megatron-LM PR 7382).
Symptom: silent; with ``--qk-clip``, as soon as one head of a layer exceeds the threshold, weights
of another whose largest logit is below zero are NaN.
Fix: a head below the threshold counts as one at the threshold, which is not scaled.
Versions: >=0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:clipped-heads"
NEEDED_WITH = ("qk_clip",)


def from_threshold(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``clip_qk`` of an attention, which starts the maximum anew after it has clipped."""

    def clip_qk(self: Any) -> None:
        core, threshold = self.core_attention, self.config.qk_clip_threshold
        if core.current_max_attn_logits is not None:
            core.current_max_attn_logits = core.current_max_attn_logits.clamp(min=threshold)
        original(self)

    return clip_qk


PATCHES = tuple(
    Patch(
        f"megatron.core.transformer.{target}.clip_qk",
        from_threshold,
        OWNER,
        "only heads above --qk-clip-threshold are scaled",
        expects="(self)",
        versions=">=0.16",
    )
    for target in ("attention:SelfAttention", "multi_latent_attention:MLASelfAttention")
)
