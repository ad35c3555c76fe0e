"""Families without experts: for each, what its ``config.json`` means and where its tensors go.

To add one, write down its codecs here, its keys in :mod:`~mindspeed.models.config_fields` and its
rules in :mod:`~mindspeed.models.tensors`; nothing else in the package names a family.
Sources: the families' model classes in transformers, and for Baichuan, InternLM and Aquila, whose
code lives next to their weights, the published names of their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.models.config_json import (
    Always,
    Codec,
    Config,
    DeltaNetKeys,
    Fields,
    Flags,
    Heads,
    LocalRope,
    NoRopeLayers,
    Rope,
    SoftmaxScale,
    Switches,
    Tied,
    WindowField,
)
from mindspeed.models.family import (
    BIASES,
    DROPOUT,
    GATED,
    HYBRID,
    LLAMA_LIKE,
    MULTIPLIERS,
    NO_DROPOUT,
    OWN_DEFAULTS,
    SILU,
    SIZES,
    family,
)
from mindspeed.models.tensors import (
    BAICHUAN,
    BLOOM,
    GEMMA,
    GLM4,
    HUNYUAN,
    INTERNLM2,
    LLAMA,
    OLMO,
    PHI3,
    QWEN3_5,
)


@dataclass(frozen=True)
class BloomSizes:
    """The MLP is always four times as wide, and there is no longest sequence."""

    def read(self, config: Config) -> Flags:
        heads = config["n_head"]
        if config["hidden_size"] % heads:
            raise ConfigError(
                f"config.json: hidden_size {config['hidden_size']} is not divisible by n_head "
                f"{heads}"
            )
        return {
            "ffn_hidden_size": 4 * config["hidden_size"],
            "max_position_embeddings": config["seq_length"],
            "kv_channels": config["hidden_size"] // heads,
            "group_query_attention": False,
        }

    def write(self, args: Any) -> Flags:
        return {"seq_length": args.max_position_embeddings}


@dataclass(frozen=True)
class GemmaEmbedding:
    """Word embeddings times the root of the hidden size."""

    def read(self, config: Config) -> Flags:
        """The factor; no key says it."""
        return {"embedding_multiplier": config["hidden_size"] ** 0.5}

    def write(self, args: Any) -> Flags:
        """Nothing."""
        return {}


@dataclass(frozen=True)
class BaichuanKind:
    """7B has rotary positions, 13B ALiBi; the second generation normalises its output layer.

    Their files say it only by the way: 13B has ``model_max_length`` alone, the second generation
    has ``z_loss_weight``.
    """

    def read(self, config: Config) -> Flags:
        rotary = "max_position_embeddings" in config
        key = "max_position_embeddings" if rotary else "model_max_length"
        if key not in config:
            raise ConfigError("config.json has no max_position_embeddings and no model_max_length")
        length = config[key]
        flags: Flags = {
            "max_position_embeddings": length,
            "lm_norm_weight": "z_loss_weight" in config,
            "z_loss_weight": float(config.get("z_loss_weight", 0)),
        }
        return flags | (Rope().read(config) if rotary else {"position_embedding_type": "alibi"})

    def write(self, args: Any) -> Flags:
        rotary = args.position_embedding_type == "rope"
        length = args.max_position_embeddings
        keys: Flags = {"model_max_length": length}
        if rotary:
            keys |= {"max_position_embeddings": length, **Rope().write(args)}
        weight = getattr(args, "z_loss_weight", 0.0)
        return keys | ({"z_loss_weight": weight} if args.lm_norm_weight else {})


_INTERN: tuple[Codec, ...] = (Fields(SIZES), SILU, NO_DROPOUT, Heads(), Tied(), Rope())
_GEMMA: tuple[Codec, ...] = (
    Fields(SIZES),
    Always(
        {k: v for k, v in GATED.items() if k != "swiglu"}
        | {
            "geglu": True,
            "norm_placement": "pre_and_post",
            "layernorm_zero_centered_gamma": True,
        },
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
    ),
    DROPOUT,
    Heads(head_size_key=True),
    Tied(),
    WindowField(typed_layers=True),
    SoftmaxScale("query_pre_attn_scalar", -0.5),
    GemmaEmbedding(),
)

DENSE = (
    family(
        "llama",
        "LlamaForCausalLM",
        (
            *LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(),
            BIASES,
            Always({}, {"mlp_bias": False}),
        ),
        LLAMA,
        model_types=("llama", "aquila"),
    ),
    family(
        "internlm",
        "InternLMForCausalLM",
        (
            *_INTERN,
            Switches("bias", ("add_qkv_bias", "add_dense_bias")),
        ),
        LLAMA,
        in_transformers=False,
        defaults={**OWN_DEFAULTS, "bias": True},
    ),
    family(
        "baichuan",
        "BaichuanForCausalLM",
        (
            Fields({k: v for k, v in SIZES.items() if k != "max_position_embeddings"}),
            SILU,
            NO_DROPOUT,
            Heads(),
            Tied(),
            BaichuanKind(),
        ),
        BAICHUAN,
        in_transformers=False,
        defaults=OWN_DEFAULTS,
    ),
    family(
        "bloom",
        "BloomForCausalLM",
        (
            Fields(
                {
                    "num_layers": "n_layer",
                    "num_attention_heads": "n_head",
                    "hidden_size": "hidden_size",
                    "vocab_size": "vocab_size",
                    "layernorm_epsilon": "layer_norm_epsilon",
                    "init_method_std": "initializer_range",
                    "hidden_dropout": "hidden_dropout",
                    "attention_dropout": "attention_dropout",
                }
            ),
            BloomSizes(),
            Always(
                {
                    "normalization": "LayerNorm",
                    "position_embedding_type": "alibi",
                    "embed_layernorm": True,
                    "openai_gelu": True,
                    "add_bias_linear": True,
                    "add_qkv_bias": True,
                },
                {"apply_residual_connection_post_layernorm": False},
            ),
            Tied(),
        ),
        BLOOM,
        defaults={"seq_length": 2048},
        prefixes=("transformer.",),
    ),
    family(
        "qwen2",
        "Qwen2ForCausalLM",
        (
            *LLAMA_LIKE,
            Always({"add_qkv_bias": True}),
            Heads(),
            Tied(),
            Rope(),
            WindowField(enabled_by="use_sliding_window", typed_layers=True),
        ),
        LLAMA,
    ),
    family(
        "qwen3",
        "Qwen3ForCausalLM",
        (
            *LLAMA_LIKE,
            Always({"qk_layernorm": True}),
            Heads(head_size_key=True),
            Tied(),
            Rope(),
            BIASES,
            WindowField(enabled_by="use_sliding_window", typed_layers=True),
        ),
        LLAMA,
    ),
    family(
        "mistral",
        "MistralForCausalLM",
        (*LLAMA_LIKE, Heads(), Tied(), Rope(), WindowField()),
        LLAMA,
    ),
    family(
        "seed_oss",
        "SeedOssForCausalLM",
        (
            Fields({**SIZES, "hidden_dropout": "residual_dropout"}),
            Always({k: v for k, v in GATED.items() if k != "hidden_dropout"}, SILU.keys),
            DROPOUT,
            Heads(head_size_key=True),
            Tied(),
            Rope(),
            Switches("attention_bias", ("add_qkv_bias",)),
            Switches("attention_out_bias", ("add_dense_bias",)),
            Always({}, {"mlp_bias": False}),
        ),
        LLAMA,
    ),
    family(
        "phi3",
        "Phi3ForCausalLM",
        (
            *LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(partial=True, own_length=True),
            WindowField(),
            Always({}, {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        ),
        PHI3,
    ),
    family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        (
            Fields(SIZES),
            SILU,
            NO_DROPOUT,
            Heads(head_size_key=True),
            Tied(),
            Rope(interleaved=True),
            Always({}, {"use_bias": False}),
        ),
        LLAMA,
    ),
    family(
        "smollm3",
        "SmolLM3ForCausalLM",
        (
            *LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(),
            NoRopeLayers(),
            BIASES,
            WindowField(enabled_by="use_sliding_window", typed_layers=True, max_layers=False),
            Always({}, {"mlp_bias": False}),
        ),
        LLAMA,
    ),
    family(
        "granite",
        "GraniteForCausalLM",
        (
            *LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(),
            BIASES,
            *MULTIPLIERS,
            Always({}, {"mlp_bias": False}),
        ),
        LLAMA,
    ),
    family(
        "glm4",
        "Glm4ForCausalLM",
        (
            *LLAMA_LIKE,
            Heads(head_size_key=True),
            Tied(),
            Rope(interleaved=True, partial=True),
            Switches("attention_bias", ("add_qkv_bias",)),
            Always({"norm_placement": "pre_and_post"}),
        ),
        GLM4,
    ),
    family(
        "gemma2",
        "Gemma2ForCausalLM",
        (
            *_GEMMA,
            Rope(),
            Fields(
                {
                    "attention_logit_softcap": "attn_logit_softcapping",
                    "final_logit_softcap": "final_logit_softcapping",
                },
                ("attention_logit_softcap", "final_logit_softcap"),
            ),
        ),
        GEMMA,
    ),
    family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (*_GEMMA, LocalRope("rope_local_base_freq"), Always({"qk_layernorm": True})),
        GEMMA,
        config_path="gemma3.Gemma3TextConfig",
    ),
    family(
        "olmo2",
        "Olmo2ForCausalLM",
        (
            *LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(),
            BIASES,
            Always({"norm_placement": "post", "qk_norm_over_all_heads": True}),
        ),
        OLMO,
    ),
    family(
        "olmo3",
        "Olmo3ForCausalLM",
        (
            *LLAMA_LIKE,
            Heads(),
            Tied(),
            LocalRope(),
            WindowField(typed_layers=True),
            BIASES,
            Always({"norm_placement": "post", "qk_norm_over_all_heads": True}),
        ),
        OLMO,
    ),
    family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        (
            *LLAMA_LIKE,
            Heads(head_size_key=True),
            Tied(),
            Rope(),
            BIASES,
            Always({"qk_layernorm": True, "qk_norm_after_rope": True}),
        ),
        HUNYUAN,
    ),
    family(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        (
            *LLAMA_LIKE,
            HYBRID,
            Heads(head_size_key=True),
            Tied(),
            Rope(partial=True),
            DeltaNetKeys(),
        ),
        QWEN3_5,
        config_path="qwen3_5.Qwen3_5TextConfig",
    ),
    family(
        "internlm3",
        "InternLM3ForCausalLM",
        (
            *LLAMA_LIKE,
            Heads(head_size_key=True),
            Tied(),
            Rope(),
            Always({}, {"qkv_bias": False, "bias": False}),
        ),
        LLAMA,
    ),
    family(
        "internlm2",
        "InternLM2ForCausalLM",
        (
            *_INTERN,
            Always({}, {"bias": False}),
        ),
        INTERNLM2,
        in_transformers=False,
        defaults=OWN_DEFAULTS,
    ),
)
"""In the order in which a model without a name is looked for."""
