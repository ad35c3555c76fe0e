"""Defects of what is logged and clipped of attention logits.

Defect: clipping of attention logits turns heads whose logits are all negative into NaN.

Where: ``clip_qk`` of ``SelfAttention`` and ``MLASelfAttention`` divides the threshold by the
largest logit of each head and takes a power of it, of heads below the threshold, too; where that
logit is negative so is the quotient (Megatron-LM PR 7382).
Symptom: silent; with ``--qk-clip``, as soon as one head of a layer exceeds the threshold, weights
of another whose largest logit is below zero are NaN.
Fix: a head below the threshold counts as one at the threshold, which is not scaled.
Versions: >=0.16.

Defect: the logged largest attention logit is that of the whole run, and keeps its graphs.

Where: ``megatron.core.optimizer.qk_clip.clip_qk`` starts the maximum anew only where it clips;
``TEDotProductAttention.forward`` keeps the autograd graph of each maximum (Megatron-LM PR 5067).
Symptom: silent; with ``--log-max-attention-logit`` and without ``--qk-clip`` the logged value never
falls, and with a native Transformer Engine memory grows with every micro-batch.
Fix: the maximum starts anew after it is logged, and has no graph.
Versions: 0.16 to 0.18.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.adaptor.arguments import may_be_on
from mindspeed.adaptor.patch import repair


def needed(values: Mapping[str, Any]) -> bool:
    """Whether the largest attention logits are known."""
    return may_be_on(values, "log_max_attention_logit") or may_be_on(values, "qk_clip")


def from_threshold(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``clip_qk`` of an attention, which starts the maximum anew after it has clipped."""

    def clip_qk(self: Any) -> None:
        core, threshold = self.core_attention, self.config.qk_clip_threshold
        if core.current_max_attn_logits is not None:
            core.current_max_attn_logits = core.current_max_attn_logits.clamp(min=threshold)
        original(self)

    return clip_qk


def start_anew(original: Callable[..., float]) -> Callable[..., float]:
    """Wrap ``clip_qk``."""

    def clip_qk(model: Any, log_max_only: bool = False) -> float:
        largest = original(model, log_max_only)
        if log_max_only:
            for chunk in model:
                for layer in chunk.module.module.decoder.layers:
                    if hasattr(layer.self_attention, "clip_qk"):  # the layers that it asks
                        layer.self_attention.core_attention.current_max_attn_logits = None
        return largest

    return clip_qk


def drop_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TEDotProductAttention.forward``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        largest = getattr(self, "current_max_attn_logits", None)
        if largest is not None:
            self.current_max_attn_logits = largest.detach()
        return output

    return forward


PATCHES = (
    *(
        repair(
            f"megatron.core.transformer.{target}.clip_qk",
            from_threshold,
            "only heads above --qk-clip-threshold are scaled",
            expects="(self)",
            versions=">=0.16",
        )
        for target in ("attention:SelfAttention", "multi_latent_attention:MLASelfAttention")
    ),
    repair(
        "megatron.core.optimizer.qk_clip:clip_qk",
        start_anew,
        "the logged largest attention logit is that of the step",
        expects="(model, log_max_only)",
        versions=">=0.16,<0.19",
    ),
)
PATCHES_OF_TRANSFORMER_ENGINE = (
    repair(
        "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
        drop_graph,
        "the largest attention logit keeps no graph",
        expects="(self, query, key, value, ...)",
        versions="<0.19",
    ),
)
