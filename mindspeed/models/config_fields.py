"""Every key of ``config.json`` that a family's class in transformers knows, and its role here.

============= =====================================================================================
used          a codec reads it, after transformers' own class has filled in what is missing
no effect     the model computes the same whatever it is (training of other heads, caches, names)
fixed         it changes the model, and Megatron has one value only; every other one is refused
============= =====================================================================================

``tests/models/test_config_fields.py`` compares these tables with the fields of the installed
classes, so that a field that is new in transformers is noticed, and changes every field of a tiny
model to see that its role is true. Keys that no class knows are ignored, as transformers does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mindspeed.json_fields import (
    ANYTHING,
    BOOL,
    NULL,
    TEXT,
    Allowed,
    Either,
    ListOf,
    Object,
    OneOf,
    Real,
    Whole,
    or_null,
)

Role = Literal["used", "no effect", "fixed"]


@dataclass(frozen=True)
class Field:
    """One key.

    Attributes:
        allowed: Its values.
        role: What becomes of it.
    """

    allowed: Allowed
    role: Role


KnownFields = Mapping[str, Field]


def used(allowed: Allowed) -> Field:
    """A key that a codec reads; null stands for the class's default."""
    return Field(or_null(allowed), "used")


def fixed(*values: Any) -> Field:
    """A key that must have one of these values, or be missing."""
    return Field(OneOf(*values, None), "fixed")


_NO_EFFECT = Field(ANYTHING, "no effect")
_SIZE = Whole(1, 2**24)
_COUNT = Whole(1, 2**16)
_IDS = Either(Whole(), ListOf(Whole()))


def _no_effect(*names: str) -> dict[str, Field]:
    return dict.fromkeys(names, _NO_EFFECT)


# Keys inside rope_parameters or rope_scaling.
ROPE: KnownFields = {
    "rope_theta": used(Real(2, 1e12)),
    "rope_type": used(TEXT),
    "type": used(TEXT),
    "factor": used(Real(1, 1e6)),
    "original_max_position_embeddings": used(Whole(1, 2**24)),
    "low_freq_factor": used(Real(0, 1e6)),
    "high_freq_factor": used(Real(0, 1e6)),
    "attention_factor": used(Real(1e-6, 1e6)),
    "beta_fast": used(Real(0, 1e6)),
    "beta_slow": used(Real(0, 1e6)),
    "mscale": used(Real(0, 1e6)),
    "mscale_all_dim": used(Real(0, 1e6)),
    "truncate": used(BOOL),
    "partial_rotary_factor": fixed(1.0),
    "short_factor": used(ListOf(Real(1e-6, 1e6))),
    "long_factor": used(ListOf(Real(1e-6, 1e6))),
    "mrope_section": fixed(),
}


def _rope_object(keys: KnownFields) -> Field:
    return used(Object({name: field.allowed for name, field in keys.items()}))


_ROPE_OBJECT = _rope_object(ROPE)
_TWO_ROPES = used(
    Object(
        {name: field.allowed for name, field in ROPE.items()}
        | dict.fromkeys(("full_attention", "sliding_attention"), _ROPE_OBJECT.allowed)
    )
)
_ALPHA: KnownFields = {"alpha": used(Real(1e-6, 1e9))}
_PART: KnownFields = {"partial_rotary_factor": used(Real(0, 1))}

_EVERY: KnownFields = {
    **_no_effect(
        "transformers_version",
        "architectures",
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "problem_type",
        "use_cache",
        "pretraining_tp",
        "output_router_logits",
        "dtype",
        "torch_dtype",
    ),
    "is_encoder_decoder": fixed(False),
    "per_layer_config": fixed(),
    "original_max_position_embeddings": fixed(),
    "bos_token_id": used(_IDS),
    "eos_token_id": used(_IDS),
    "pad_token_id": used(Whole(-1)),
    "initializer_range": used(Real(0, 1)),
    "vocab_size": used(Whole(1, 2**26)),
    "hidden_size": used(_SIZE),
    "num_hidden_layers": used(Whole(1, 10_000)),
    "num_attention_heads": used(_COUNT),
    "tie_word_embeddings": used(BOOL),
}
_ROTARY: KnownFields = {
    "rope_parameters": _ROPE_OBJECT,
    "rope_scaling": _ROPE_OBJECT,
    "rope_theta": ROPE["rope_theta"],
    "partial_rotary_factor": ROPE["partial_rotary_factor"],
}
_PARTLY_ROTARY: KnownFields = {
    **_ROTARY,
    **_PART,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _rope_object({**ROPE, **_PART})),
}
_GATED: KnownFields = {
    **_EVERY,
    "intermediate_size": used(_SIZE),
    "max_position_embeddings": used(Whole(1)),
    "rms_norm_eps": used(Real(0, 1)),
    "hidden_act": fixed("silu", "swish"),
}
_DROPOUT: KnownFields = {"attention_dropout": used(Real(0, 1))}
_HEADS: KnownFields = dict.fromkeys(("num_key_value_heads", "head_dim"), used(_COUNT))
_LLAMA_LIKE: KnownFields = {
    **_GATED,
    **_ROTARY,
    **_DROPOUT,
    **_HEADS,
}
_WINDOW: KnownFields = {
    "sliding_window": used(Whole(1)),
    # Mistral's class does not know it, and later versions give it a meaning.
    "layer_types": used(ListOf(TEXT)),
}
_SWITCHED_WINDOW: KnownFields = {
    **_WINDOW,
    "use_sliding_window": used(BOOL),
    "max_window_layers": used(Whole()),
}
_BIAS: KnownFields = {"attention_bias": used(BOOL)}
_EXPERTS: KnownFields = {
    "num_experts": used(_COUNT),
    "num_local_experts": used(_COUNT),
    "num_experts_per_tok": used(_COUNT),
    "router_aux_loss_coef": used(Real(0, 1e6)),
}
_SPARSE: KnownFields = {
    "norm_topk_prob": used(BOOL),
    "decoder_sparse_step": used(_COUNT),
    "mlp_only_layers": used(ListOf(Whole())),
}
_LATENT: KnownFields = {
    "num_key_value_heads": used(_COUNT),
    # The norms inside latent attention have this epsilon whatever the file says.
    "rms_norm_eps": fixed(1e-6),
    "attention_bias": fixed(False),
    "q_lora_rank": used(_SIZE),
    "kv_lora_rank": used(_SIZE),
    "qk_nope_head_dim": used(_SIZE),
    "qk_rope_head_dim": used(_SIZE),
    "v_head_dim": used(_SIZE),
}
_ROUTED: KnownFields = {
    "n_routed_experts": used(_COUNT),
    "num_experts_per_tok": used(_COUNT),
    "n_shared_experts": used(Whole(0, 2**16)),
    "n_group": used(_COUNT),
    "topk_group": used(_COUNT),
    "routed_scaling_factor": used(Real(0, 1e6)),
    "first_k_dense_replace": used(Whole()),
    "moe_intermediate_size": used(_SIZE),
}
_PREDICTION: KnownFields = {
    # Layers of multi-token prediction: read with --mtp-num-layers.
    "num_mtp_layers": Field(or_null(Whole(0, 64)), "no effect"),
    "num_nextn_predict_layers": Field(or_null(Whole(0, 64)), "no effect"),
}
_HYBRID: KnownFields = {
    **_HEADS,
    "attention_bias": fixed(False),
    "layer_types": used(ListOf(TEXT)),
    "full_attention_interval": used(_COUNT),
    "linear_conv_kernel_dim": used(_COUNT),
    "linear_key_head_dim": used(_SIZE),
    "linear_value_head_dim": used(_SIZE),
    "linear_num_key_heads": used(_COUNT),
    "linear_num_value_heads": used(_COUNT),
}
_MULTIPLIERS: KnownFields = dict.fromkeys(
    ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    used(Real(1e-6, 1e6)),
)
_GEMMA: KnownFields = {
    **{key: field for key, field in _LLAMA_LIKE.items() if key != "hidden_act"},
    **_WINDOW,
    "hidden_activation": fixed("gelu_pytorch_tanh"),
    "attention_bias": fixed(False),
    "query_pre_attn_scalar": used(Real(1e-6, 1e9)),
    "use_bidirectional_attention": fixed(False),
}
_HUNYUAN: KnownFields = {
    **_LLAMA_LIKE,
    **_BIAS,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _rope_object({**ROPE, **_ALPHA})),
    "eod_token_id": _NO_EFFECT,
}
_PLAIN_ROPE = Field(
    or_null(Object({"rope_theta": OneOf(10000.0), "rope_type": OneOf("default"), "factor": NULL})),
    "fixed",
)
_OWN: KnownFields = {
    # Classes next to the weights: their rotary base is in the code.
    **_GATED,
    "rope_parameters": _PLAIN_ROPE,
    "rope_scaling": _PLAIN_ROPE,
    "rope_theta": fixed(10000.0),
}

FIELDS: Mapping[str, KnownFields] = {
    "llama": {**_LLAMA_LIKE, **_BIAS, "mlp_bias": fixed(False)},
    "qwen2": {**_LLAMA_LIKE, **_SWITCHED_WINDOW},
    "qwen3": {**_LLAMA_LIKE, **_SWITCHED_WINDOW, **_BIAS},
    "mistral": {**_LLAMA_LIKE, **_WINDOW},
    "mixtral": {**_LLAMA_LIKE, **_WINDOW, **_EXPERTS, "router_jitter_noise": fixed(0.0)},
    "qwen3_moe": {
        **_LLAMA_LIKE,
        **_SWITCHED_WINDOW,
        **_BIAS,
        **_EXPERTS,
        "moe_intermediate_size": used(_SIZE),
        **_SPARSE,
    },
    "deepseek_v3": {
        **_GATED,
        **_ROTARY,
        **_DROPOUT,
        **_LATENT,
        **_ROUTED,
        **_PREDICTION,
        "rope_interleave": fixed(True),
        "norm_topk_prob": fixed(True),
        "num_local_experts": used(_COUNT),
        # Of the class next to the weights, which has the same model under more names.
        "scoring_func": fixed("sigmoid"),
        "topk_method": fixed("noaux_tc"),
        "moe_layer_freq": fixed(1),
    },
    "deepseek_v2": {
        **_GATED,
        **_ROTARY,
        **_DROPOUT,
        **_LATENT,
        **_ROUTED,
        "head_dim": Field(or_null(_COUNT), "no effect"),  # qk_rope_head_dim again
        "mlp_bias": fixed(False),
        # Its class multiplies the probabilities by routed_scaling_factor and does no more.
        "norm_topk_prob": fixed(False),
        "num_experts": used(_COUNT),
        "topk_method": used(OneOf("greedy", "group_limited_greedy")),
        "scoring_func": fixed("softmax"),
        "moe_layer_freq": fixed(1),
    },
    "glm4_moe": {
        **_GATED,
        **_PARTLY_ROTARY,
        **_DROPOUT,
        **_ROUTED,
        **_PREDICTION,
        **_HEADS,
        "attention_bias": used(BOOL),
        "use_qk_norm": used(BOOL),
        "norm_topk_prob": fixed(True),
        "num_local_experts": used(_COUNT),
    },
    "seed_oss": {
        **_LLAMA_LIKE,
        **_BIAS,
        "attention_out_bias": used(BOOL),
        "residual_dropout": used(Real(0, 1)),
        "mlp_bias": fixed(False),
    },
    "qwen2_moe": {
        **_LLAMA_LIKE,
        **_SWITCHED_WINDOW,
        **_EXPERTS,
        "sliding_window": used(Whole(0)),  # 0 by default, which counts where the window is on
        "qkv_bias": used(BOOL),
        "moe_intermediate_size": used(_SIZE),
        "shared_expert_intermediate_size": used(_SIZE),
        **_SPARSE,
    },
    "phi3": {
        **_GATED,
        **_PARTLY_ROTARY,
        **_DROPOUT,
        **_WINDOW,
        **_HEADS,
        "original_max_position_embeddings": used(Whole(1, 2**24)),
        "resid_pdrop": fixed(0.0),
        "embd_pdrop": fixed(0.0),
    },
    "ernie4_5": {
        **_GATED,
        **_ROTARY,
        **_HEADS,
        "use_bias": fixed(False),
    },
    "smollm3": {
        **_LLAMA_LIKE,
        **_WINDOW,
        "use_sliding_window": used(BOOL),
        **_BIAS,
        "mlp_bias": fixed(False),
        "no_rope_layers": used(ListOf(Whole(0, 1))),
        "no_rope_layer_interval": used(_COUNT),
    },
    "granite": {**_LLAMA_LIKE, **_BIAS, **_MULTIPLIERS, "mlp_bias": fixed(False)},
    "granitemoe": {
        **_LLAMA_LIKE,
        **_BIAS,
        **_MULTIPLIERS,
        **{key: field for key, field in _EXPERTS.items() if key != "num_experts"},
    },
    "glm4": {
        **_GATED,
        **_PARTLY_ROTARY,
        **_DROPOUT,
        **_BIAS,
        **_HEADS,
    },
    "gemma2": {
        **_GEMMA,
        "attn_logit_softcapping": used(Real(1e-6, 1e9)),
        "final_logit_softcapping": used(Real(1e-6, 1e9)),
    },
    "gemma3_text": {
        **_GEMMA,
        "rope_parameters": _TWO_ROPES,
        "rope_local_base_freq": ROPE["rope_theta"],
        "attn_logit_softcapping": fixed(),
        "final_logit_softcapping": fixed(),
        "sliding_window_pattern": used(_COUNT),
    },
    "olmo2": {**_LLAMA_LIKE, **_BIAS},
    "olmo3": {**_LLAMA_LIKE, **_WINDOW, **_BIAS, "rope_parameters": _TWO_ROPES},
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": {
        **_HUNYUAN,
        **_no_effect("sep_token_id"),
        "num_experts": used(_COUNT),
        "num_local_experts": used(_COUNT),
        "moe_topk": used(Either(_COUNT, ListOf(_COUNT))),
        "num_experts_per_tok": used(Either(_COUNT, ListOf(_COUNT))),
    },
    "ernie4_5_moe": {
        **_GATED,
        **_ROTARY,
        **_no_effect("router_aux_loss_coef"),
        "num_key_value_heads": used(_COUNT),
        "use_bias": fixed(False),
        "moe_intermediate_size": used(_SIZE),
        "moe_num_experts": used(_COUNT),
        "num_experts": used(_COUNT),
        "moe_k": used(_COUNT),
        "num_experts_per_tok": used(_COUNT),
        "moe_num_shared_experts": used(Whole(0, 2**16)),
        "moe_layer_start_index": used(Whole()),
        "moe_layer_end_index": used(Whole(-1)),
        "moe_layer_interval": used(_COUNT),
        "moe_norm_min": fixed(1e-12),
    },
    "llama4_text": {
        **_LLAMA_LIKE,
        **_BIAS,
        **_no_effect("router_aux_loss_coef", "router_jitter_noise"),
        "intermediate_size_mlp": used(_SIZE),
        "num_local_experts": used(_COUNT),
        "num_experts_per_tok": fixed(1),
        "moe_layers": used(ListOf(Whole())),
        "interleave_moe_layer_step": used(_COUNT),
        "use_qk_norm": used(BOOL),
        "no_rope_layers": used(ListOf(Whole(0, 1))),
        "no_rope_layer_interval": used(_COUNT),
        "layer_types": used(ListOf(TEXT)),
        "attention_chunk_size": used(_SIZE),
        "attn_temperature_tuning": used(BOOL),
        "floor_scale": used(Whole(1)),
        "attn_scale": used(Real(1e-6, 1e6)),
    },
    "minimax_m2": {
        **_GATED,
        **_PARTLY_ROTARY,
        **_DROPOUT,
        **_HEADS,
        "rotary_dim": used(_COUNT),
        "num_experts": used(_COUNT),
        "num_local_experts": used(_COUNT),
        "num_experts_per_tok": used(_COUNT),
        "router_aux_loss_coef": _NO_EFFECT,
        "router_jitter_noise": fixed(0.0),
    },
    "gpt_oss": {
        **_LLAMA_LIKE,
        **_WINDOW,
        **_EXPERTS,
        "attention_bias": fixed(True),
        "swiglu_alpha": fixed(1.702),
        "swiglu_limit": used(Real(1e-6, 1e6)),
    },
    "qwen3_next": {
        **_GATED,
        **_PARTLY_ROTARY,
        **_DROPOUT,
        **_EXPERTS,
        **_HYBRID,
        "moe_intermediate_size": used(_SIZE),
        "shared_expert_intermediate_size": used(_SIZE),
        **_SPARSE,
    },
    "qwen3_5_moe_text": {
        **{key: field for key, field in _GATED.items() if key != "intermediate_size"},
        **_PARTLY_ROTARY,
        **_DROPOUT,
        **_EXPERTS,
        **_HYBRID,
        "moe_intermediate_size": used(_SIZE),
        "shared_expert_intermediate_size": used(_SIZE),
    },
    "internlm3": {
        **_LLAMA_LIKE,
        "qkv_bias": fixed(False),
        "bias": fixed(False),
        "attention_bias": fixed(False),
        "mlp_bias": fixed(False),
    },
    "qwen3_5_text": {**_GATED, **_PARTLY_ROTARY, **_DROPOUT, **_HYBRID},
    "bloom": {
        **_EVERY,
        **_DROPOUT,
        **_no_effect("slow_but_exact"),
        "n_layer": used(Whole(1, 10_000)),
        "n_head": used(_COUNT),
        "n_embed": used(_SIZE),
        "layer_norm_epsilon": used(Real(0, 1)),
        "hidden_dropout": used(Real(0, 1)),
        "apply_residual_connection_post_layernorm": fixed(False),
        "seq_length": used(Whole(1)),
    },
    "internlm2": {
        **_GATED,
        **_ROTARY,
        "num_key_value_heads": used(_COUNT),
        "bias": fixed(False),
    },
    "internlm": {
        **_OWN,
        "bias": used(BOOL),
        "rotary": fixed({"base": 10000, "type": "dynamic"}, {"base": 10000, "type": "origin"}),
    },
    "baichuan": {
        **_OWN,
        "model_max_length": used(Whole(1)),
        "z_loss_weight": used(Real(0, 1e6)),
    },
}
