"""Families with experts: for each, what its ``config.json`` means and where its tensors go.

To add one, write down its codecs here, its keys in :mod:`~mindspeed.models.config_fields` and its
rules in :mod:`~mindspeed.models.tensors`; nothing else in the package names a family.
Sources: the families' model classes in transformers.
"""

from __future__ import annotations

from mindspeed.models.config_json import (
    Always,
    DeltaNet,
    Fields,
    Heads,
    Rope,
    Switches,
    Tied,
    Window,
)
from mindspeed.models.family_parts import BIASES, DROPOUT, HYBRID, LLAMA_LIKE, SILU, SIZES, family
from mindspeed.models.moe_configs import (
    GatedSharedExpert,
    GreedyExperts,
    Latent,
    MultiTokenPrediction,
    SigmoidExperts,
    SoftmaxExperts,
    UngroupedSigmoidExperts,
)
from mindspeed.models.tensors import (
    DEEPSEEK,
    DEEPSEEK_V2,
    GLM_MOE,
    GPT_OSS,
    GPT_OSS_STACKS,
    MINIMAX,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    QWEN_MOE,
)

EXPERTS = (
    family(
        "mixtral",
        "MixtralForCausalLM",
        (
            *LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(),
            Window(),
            SoftmaxExperts("num_local_experts", own_size=False, renormalize=True),
        ),
        MIXTRAL,
    ),
    family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (
            *LLAMA_LIKE,
            Always({"qk_layernorm": True}),
            Heads(head_size_key=True),
            Tied(),
            Rope(),
            BIASES,
            Window(enabled_by="use_sliding_window"),
            SoftmaxExperts("num_experts", own_size=True, renormalize=None),
        ),
        QWEN_MOE,
    ),
    family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        (
            *LLAMA_LIKE,
            Tied(),
            Latent(),
            SigmoidExperts(),
            MultiTokenPrediction(),
            Always({}, {"attention_bias": False, "rope_interleave": True}),
        ),
        DEEPSEEK,
        model_types=("deepseek_v3", "kimi_k2"),
    ),
    family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        (*LLAMA_LIKE, Tied(), Latent(), GreedyExperts(), Always({}, {"attention_bias": False})),
        DEEPSEEK_V2,
    ),
    family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        (
            *LLAMA_LIKE,
            Heads(head_size_key=True),
            Tied(),
            Rope(partial=True),
            Switches("attention_bias", ("add_qkv_bias",)),
            Switches("use_qk_norm", ("qk_layernorm",)),
            SigmoidExperts(),
            MultiTokenPrediction(),
        ),
        GLM_MOE,
    ),
    family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        (
            *LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(),
            Switches("qkv_bias", ("add_qkv_bias",)),
            Window(enabled_by="use_sliding_window", typed_layers=True),
            SoftmaxExperts("num_experts", own_size=True, renormalize=None),
            GatedSharedExpert(),
        ),
        QWEN2_MOE,
    ),
    family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        (
            *LLAMA_LIKE,
            Heads(head_size_key=True),
            Tied(),
            Rope(partial=True),
            Always({"qk_norm_over_all_heads": True}),
            UngroupedSigmoidExperts(),
        ),
        MINIMAX,
    ),
    family(
        "gpt_oss",
        "GptOssForCausalLM",
        (
            Fields({**SIZES, "activation_func_clamp_value": "swiglu_limit"}),
            Always(
                {
                    "normalization": "RMSNorm",
                    "quick_geglu": True,
                    "glu_linear_offset": 1.0,
                    "add_bias_linear": True,
                    "add_qkv_bias": True,
                    "hidden_dropout": 0.0,
                    "softmax_type": "learnable",
                    "bias_dropout_fusion": False,  # grouped experts with biases have none
                },
                {"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702},
            ),
            DROPOUT,
            Heads(head_size_key=True),
            Tied(),
            Rope(),
            Window(typed_layers=True),
            SoftmaxExperts("num_local_experts", own_size=False, renormalize=True),
        ),
        GPT_OSS,
        stacks=GPT_OSS_STACKS,
    ),
    family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        (
            *LLAMA_LIKE,
            HYBRID,
            Heads(head_size_key=True),
            Tied(),
            Rope(partial=True),
            DeltaNet(),
            SoftmaxExperts("num_experts", own_size=True, renormalize=None),
            GatedSharedExpert(),
        ),
        QWEN3_NEXT,
    ),
    family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        (
            # Every layer has experts: there is no size of a dense one.
            Fields({k: v for k, v in SIZES.items() if k != "ffn_hidden_size"}),
            Fields({"ffn_hidden_size": "moe_intermediate_size"}),
            SILU,
            DROPOUT,
            HYBRID,
            Heads(head_size_key=True),
            Tied(),
            Rope(partial=True),
            DeltaNet(),
            SoftmaxExperts("num_experts", own_size=True, renormalize=True, dense_layers=False),
            GatedSharedExpert(),
        ),
        QWEN3_5_MOE,
        config_path="qwen3_5_moe.Qwen3_5MoeTextConfig",
    ),
)
