"""Flags of the parts of some model families that Megatron Core lacks.

What they do is in :mod:`mindspeed.models.model_extras`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mindspeed.flags import flag, flags_of
from mindspeed.ranges import ABOVE_ZERO, NOT_NEGATIVE, POSITIVE


@dataclass(frozen=True)
class ModelExtras:
    """The flags: fields of the model's section of a recipe."""

    add_dense_bias: bool = flag(
        False, "bias of the attention's output projection, also with --disable-bias-linear"
    )
    embed_layernorm: bool = flag(False, "norm after the word embeddings (BLOOM)")
    embedding_multiplier: float = flag(
        1.0, "factor on the word embeddings (Gemma, Granite)", range=ABOVE_ZERO
    )
    residual_multiplier: float = flag(
        1.0, "factor on the output of attention and MLP (Granite)", range=ABOVE_ZERO
    )
    norm_placement: Literal["pre", "pre_and_post", "post"] = flag(
        "pre",
        "norms in front of attention and MLP, behind them (OLMo), or both (GLM-4, Gemma)",
    )
    qk_norm_over_all_heads: bool = flag(
        False, "RMSNorm of queries and keys over all heads at once (OLMo, MiniMax-M2)"
    )
    qk_norm_after_rope: bool = flag(
        False, "--qk-layernorm behind the rotary embedding, not in front of it (Hunyuan)"
    )
    rope_parameters: str | None = flag(
        None,
        "scaled rotary embedding as config.json has it, in JSON: yarn, longrope, dynamic, linear, "
        "llama3",
    )
    local_rotary_base: int | None = flag(
        None,
        "base of the rotary embedding, without scaling, in layers with a window (Gemma 3)",
        range=POSITIVE,
    )
    geglu: bool = flag(False, "gated linear unit with GeLU's tanh approximation (Gemma)")
    lm_norm_weight: bool = flag(False, "output layer with weight rows of norm one (Baichuan 2)")
    logits_divisor: float = flag(1.0, "divide the logits by this (Granite)", range=ABOVE_ZERO)
    final_logit_softcap: float | None = flag(
        None, "keep logits between plus and minus this, by tanh (Gemma 2)", range=ABOVE_ZERO
    )
    attention_logit_softcap: float | None = flag(
        None,
        "keep attention scores between plus and minus this, by tanh (Gemma 2); computed by the "
        "plain formula, because no fused attention does so",
        range=ABOVE_ZERO,
    )
    attention_chunk_size: int | None = flag(
        None,
        "tokens see their own chunk of so many tokens, in layers with positions (Llama 4)",
        range=POSITIVE,
    )
    nope_temperature: float | None = flag(
        None,
        "scale queries by 1 + this * log(1 + (position + 1) // floor), in layers without "
        "positions (Llama 4)",
        range=ABOVE_ZERO,
    )
    nope_temperature_floor: int = flag(
        8192, "tokens from which --nope-temperature counts", range=POSITIVE
    )
    moe_group_score_experts: int | None = flag(
        None,
        "best experts of a group whose scores are the group's (DeepSeek-V2: 1); default the "
        "experts chosen by the groups chosen",
        range=POSITIVE,
    )
    moe_softmax_choice_bias: bool = flag(
        False, "a bias on softmax scores when experts are chosen, kept as loaded (ERNIE 4.5)"
    )
    z_loss_weight: float = flag(
        0.0,
        "add this times the square of the largest logit to each token's loss (Baichuan 2)",
        range=NOT_NEGATIVE,
    )
    mask_padded_vocab: bool = flag(
        False, "padding entries of the vocabulary take no part in the loss (with --model: on)"
    )


NO_ARCHITECTURE = ("z_loss_weight", "mask_padded_vocab")
"""Flags that change the loss, not the model."""
PLAIN: dict[str, Any] = {
    item.name: item.default for item in flags_of(ModelExtras) if item.name not in NO_ARCHITECTURE
}
"""The other flags, with the value that a model without the part has."""
