"""The families: for each, what its ``config.json`` means and where its tensors go.

To add one, write down its codecs here and its rules in :mod:`~mindspeed.models.tensors`; nothing
else in the package names a family.
Sources: the families' model classes in transformers, and for Baichuan, InternLM and Aquila, whose
code lives next to their weights, the published names of their tensors.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed import plugins
from mindspeed.errors import ConfigError
from mindspeed.json_fields import TEXT, check
from mindspeed.models.config_fields import FIELDS
from mindspeed.models.config_json import (
    Always,
    Codec,
    Config,
    DeltaNet,
    Fields,
    Flags,
    Heads,
    LocalRope,
    NoRopeLayers,
    Rope,
    SoftmaxScale,
    Switches,
    Tied,
    Window,
)
from mindspeed.models.family import Family
from mindspeed.models.family import differing_flags as differing_flags
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
    BAICHUAN,
    BLOOM,
    DEEPSEEK,
    DEEPSEEK_V2,
    GEMMA,
    GLM4,
    GLM_MOE,
    GPT,
    GPT_OSS,
    GPT_OSS_STACKS,
    HUNYUAN,
    INTERNLM2,
    LLAMA,
    MINIMAX,
    MIXTRAL,
    OLMO,
    PHI3,
    QWEN2_MOE,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    QWEN_MOE,
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


_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "layernorm_epsilon": "rms_norm_eps",
    "init_method_std": "initializer_range",
}
_GATED = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
}
_SILU = Always(_GATED, {"hidden_act": "silu"})
_DROPOUT = Fields({"attention_dropout": "attention_dropout"})
_NO_DROPOUT = Always({"attention_dropout": 0.0})
_LLAMA_LIKE: tuple[Codec, ...] = (Fields(_SIZES), _SILU, _DROPOUT)
_HYBRID = Always(
    {"qk_layernorm": True, "layernorm_zero_centered_gamma": True}, {"attention_bias": False}
)
# What a missing key means in the classes that are published next to the weights.
_OWN_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


_FAMILIES = (
    Family(
        "llama",
        ("llama", "aquila"),
        "LlamaForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(),
            Switches("attention_bias", ("add_qkv_bias", "add_dense_bias")),
            Always({}, {"mlp_bias": False}),
        ),
        LLAMA,
        FIELDS["llama"],
    ),
    Family(
        "internlm",
        ("internlm",),
        "InternLMForCausalLM",
        (
            Fields(_SIZES),
            _SILU,
            _NO_DROPOUT,
            Heads(),
            Tied(),
            Rope(),
            Switches("bias", ("add_qkv_bias", "add_dense_bias")),
        ),
        LLAMA,
        FIELDS["internlm"],
        in_transformers=False,
        defaults={**_OWN_DEFAULTS, "bias": True},
    ),
    Family(
        "baichuan",
        ("baichuan",),
        "BaichuanForCausalLM",
        (
            Fields({k: v for k, v in _SIZES.items() if k != "max_position_embeddings"}),
            _SILU,
            _NO_DROPOUT,
            Heads(),
            Tied(),
            BaichuanKind(),
        ),
        BAICHUAN,
        FIELDS["baichuan"],
        in_transformers=False,
        defaults=_OWN_DEFAULTS,
    ),
    Family(
        "bloom",
        ("bloom",),
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
        FIELDS["bloom"],
        defaults={"seq_length": 2048},
        prefixes=("transformer.",),
    ),
    Family(
        "qwen2",
        ("qwen2",),
        "Qwen2ForCausalLM",
        (
            *_LLAMA_LIKE,
            Always({"add_qkv_bias": True}),
            Heads(),
            Tied(),
            Rope(),
            Window(enabled_by="use_sliding_window", typed_layers=True),
        ),
        LLAMA,
        FIELDS["qwen2"],
    ),
    Family(
        "qwen3",
        ("qwen3",),
        "Qwen3ForCausalLM",
        (
            *_LLAMA_LIKE,
            Always({"qk_layernorm": True}),
            Heads(head_size_key=True),
            Tied(),
            Rope(),
            Switches("attention_bias", ("add_qkv_bias", "add_dense_bias")),
            Window(enabled_by="use_sliding_window", typed_layers=True),
        ),
        LLAMA,
        FIELDS["qwen3"],
    ),
    Family(
        "mistral",
        ("mistral",),
        "MistralForCausalLM",
        (*_LLAMA_LIKE, Heads(), Tied(), Rope(), Window()),
        LLAMA,
        FIELDS["mistral"],
    ),
    Family(
        "mixtral",
        ("mixtral",),
        "MixtralForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(),
            Window(),
            SoftmaxExperts("num_local_experts", own_size=False, renormalize=True),
        ),
        MIXTRAL,
        FIELDS["mixtral"],
    ),
    Family(
        "qwen3_moe",
        ("qwen3_moe",),
        "Qwen3MoeForCausalLM",
        (
            *_LLAMA_LIKE,
            Always({"qk_layernorm": True}),
            Heads(head_size_key=True),
            Tied(),
            Rope(),
            Switches("attention_bias", ("add_qkv_bias", "add_dense_bias")),
            Window(enabled_by="use_sliding_window"),
            SoftmaxExperts("num_experts", own_size=True, renormalize=None),
        ),
        QWEN_MOE,
        FIELDS["qwen3_moe"],
    ),
    Family(
        "deepseek_v3",
        ("deepseek_v3", "kimi_k2"),
        "DeepseekV3ForCausalLM",
        (
            *_LLAMA_LIKE,
            Tied(),
            Latent(),
            SigmoidExperts(),
            MultiTokenPrediction(),
            Always({}, {"attention_bias": False, "rope_interleave": True}),
        ),
        DEEPSEEK,
        FIELDS["deepseek_v3"],
    ),
    Family(
        "deepseek_v2",
        ("deepseek_v2",),
        "DeepseekV2ForCausalLM",
        (*_LLAMA_LIKE, Tied(), Latent(), GreedyExperts(), Always({}, {"attention_bias": False})),
        DEEPSEEK_V2,
        FIELDS["deepseek_v2"],
    ),
    Family(
        "glm4_moe",
        ("glm4_moe",),
        "Glm4MoeForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(head_size_key=True),
            Tied(),
            Rope(partial=True),
            Switches("attention_bias", ("add_qkv_bias",)),
            Switches("use_qk_norm", ("qk_layernorm",)),
            SigmoidExperts(),
            MultiTokenPrediction(),
        ),
        GLM_MOE,
        FIELDS["glm4_moe"],
    ),
    Family(
        "seed_oss",
        ("seed_oss",),
        "SeedOssForCausalLM",
        (
            Fields({**_SIZES, "hidden_dropout": "residual_dropout"}),
            Always({k: v for k, v in _GATED.items() if k != "hidden_dropout"}, _SILU.keys),
            _DROPOUT,
            Heads(head_size_key=True),
            Tied(),
            Rope(),
            Switches("attention_bias", ("add_qkv_bias",)),
            Switches("attention_out_bias", ("add_dense_bias",)),
            Always({}, {"mlp_bias": False}),
        ),
        LLAMA,
        FIELDS["seed_oss"],
    ),
    Family(
        "qwen2_moe",
        ("qwen2_moe",),
        "Qwen2MoeForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(),
            Switches("qkv_bias", ("add_qkv_bias",)),
            Window(enabled_by="use_sliding_window", typed_layers=True),
            SoftmaxExperts("num_experts", own_size=True, renormalize=None),
            GatedSharedExpert(),
        ),
        QWEN2_MOE,
        FIELDS["qwen2_moe"],
    ),
    Family(
        "phi3",
        ("phi3",),
        "Phi3ForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(partial=True, own_length=True),
            Window(),
            Always({}, {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        ),
        PHI3,
        FIELDS["phi3"],
    ),
    Family(
        "ernie4_5",
        ("ernie4_5",),
        "Ernie4_5ForCausalLM",
        (
            Fields(_SIZES),
            _SILU,
            _NO_DROPOUT,
            Heads(head_size_key=True),
            Tied(),
            Rope(interleaved=True),
            Always({}, {"use_bias": False}),
        ),
        LLAMA,
        FIELDS["ernie4_5"],
    ),
    Family(
        "smollm3",
        ("smollm3",),
        "SmolLM3ForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(),
            NoRopeLayers(),
            Switches("attention_bias", ("add_qkv_bias", "add_dense_bias")),
            Window(enabled_by="use_sliding_window", typed_layers=True, max_layers=False),
            Always({}, {"mlp_bias": False}),
        ),
        LLAMA,
        FIELDS["smollm3"],
    ),
    Family(
        "granite",
        ("granite",),
        "GraniteForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(),
            Switches("attention_bias", ("add_qkv_bias", "add_dense_bias")),
            SoftmaxScale("attention_multiplier"),
            Fields(
                {
                    "embedding_multiplier": "embedding_multiplier",
                    "residual_multiplier": "residual_multiplier",
                    "logits_divisor": "logits_scaling",
                }
            ),
            Always({}, {"mlp_bias": False}),
        ),
        LLAMA,
        FIELDS["granite"],
    ),
    Family(
        "glm4",
        ("glm4",),
        "Glm4ForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(head_size_key=True),
            Tied(),
            Rope(interleaved=True, partial=True),
            Switches("attention_bias", ("add_qkv_bias",)),
            Always({"norm_placement": "pre_and_post"}),
        ),
        GLM4,
        FIELDS["glm4"],
    ),
    Family(
        "gemma3_text",
        ("gemma3_text",),
        "Gemma3ForCausalLM",
        (
            Fields(_SIZES),
            Always(
                {k: v for k, v in _GATED.items() if k != "swiglu"}
                | {
                    "geglu": True,
                    "qk_layernorm": True,
                    "norm_placement": "pre_and_post",
                    "layernorm_zero_centered_gamma": True,
                },
                {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
            ),
            _DROPOUT,
            Heads(head_size_key=True),
            Tied(),
            LocalRope("rope_local_base_freq"),
            Window(typed_layers=True),
            SoftmaxScale("query_pre_attn_scalar", -0.5),
            GemmaEmbedding(),
        ),
        GEMMA,
        FIELDS["gemma3_text"],
        config_path="gemma3.Gemma3TextConfig",
    ),
    Family(
        "olmo2",
        ("olmo2",),
        "Olmo2ForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(),
            Switches("attention_bias", ("add_qkv_bias", "add_dense_bias")),
            Always({"norm_placement": "post", "qk_norm_over_all_heads": True}),
        ),
        OLMO,
        FIELDS["olmo2"],
    ),
    Family(
        "olmo3",
        ("olmo3",),
        "Olmo3ForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(),
            Tied(),
            LocalRope(),
            Window(typed_layers=True),
            Switches("attention_bias", ("add_qkv_bias", "add_dense_bias")),
            Always({"norm_placement": "post", "qk_norm_over_all_heads": True}),
        ),
        OLMO,
        FIELDS["olmo3"],
    ),
    Family(
        "hunyuan_v1_dense",
        ("hunyuan_v1_dense",),
        "HunYuanDenseV1ForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(head_size_key=True),
            Tied(),
            Rope(),
            Switches("attention_bias", ("add_qkv_bias", "add_dense_bias")),
            Always({"qk_layernorm": True, "qk_norm_after_rope": True}),
        ),
        HUNYUAN,
        FIELDS["hunyuan_v1_dense"],
    ),
    Family(
        "minimax_m2",
        ("minimax_m2",),
        "MiniMaxM2ForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(head_size_key=True),
            Tied(),
            Rope(partial=True),
            Always({"qk_norm_over_all_heads": True}),
            UngroupedSigmoidExperts(),
        ),
        MINIMAX,
        FIELDS["minimax_m2"],
    ),
    Family(
        "gpt_oss",
        ("gpt_oss",),
        "GptOssForCausalLM",
        (
            Fields({**_SIZES, "activation_func_clamp_value": "swiglu_limit"}),
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
            _DROPOUT,
            Heads(head_size_key=True),
            Tied(),
            Rope(),
            Window(typed_layers=True),
            SoftmaxExperts("num_local_experts", own_size=False, renormalize=True),
        ),
        GPT_OSS,
        FIELDS["gpt_oss"],
        stacks=GPT_OSS_STACKS,
    ),
    Family(
        "qwen3_next",
        ("qwen3_next",),
        "Qwen3NextForCausalLM",
        (
            *_LLAMA_LIKE,
            _HYBRID,
            Heads(head_size_key=True),
            Tied(),
            Rope(partial=True),
            DeltaNet(),
            SoftmaxExperts("num_experts", own_size=True, renormalize=None),
            GatedSharedExpert(),
        ),
        QWEN3_NEXT,
        FIELDS["qwen3_next"],
    ),
    Family(
        "qwen3_5_text",
        ("qwen3_5_text",),
        "Qwen3_5ForCausalLM",
        (
            *_LLAMA_LIKE,
            _HYBRID,
            Heads(head_size_key=True),
            Tied(),
            Rope(partial=True),
            DeltaNet(),
        ),
        QWEN3_5,
        FIELDS["qwen3_5_text"],
        config_path="qwen3_5.Qwen3_5TextConfig",
    ),
    Family(
        "qwen3_5_moe_text",
        ("qwen3_5_moe_text",),
        "Qwen3_5MoeForCausalLM",
        (
            # Every layer has experts: there is no size of a dense one.
            Fields({k: v for k, v in _SIZES.items() if k != "ffn_hidden_size"}),
            Fields({"ffn_hidden_size": "moe_intermediate_size"}),
            _SILU,
            _DROPOUT,
            _HYBRID,
            Heads(head_size_key=True),
            Tied(),
            Rope(partial=True),
            DeltaNet(),
            SoftmaxExperts("num_experts", own_size=True, renormalize=True, dense_layers=False),
            GatedSharedExpert(),
        ),
        QWEN3_5_MOE,
        FIELDS["qwen3_5_moe_text"],
        config_path="qwen3_5_moe.Qwen3_5MoeTextConfig",
    ),
    Family(
        "internlm3",
        ("internlm3",),
        "InternLM3ForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(head_size_key=True),
            Tied(),
            Rope(),
            Always({}, {"qkv_bias": False, "bias": False}),
        ),
        LLAMA,
        FIELDS["internlm3"],
    ),
    Family(
        "internlm2",
        ("internlm2",),
        "InternLM2ForCausalLM",
        (
            Fields(_SIZES),
            _SILU,
            _NO_DROPOUT,
            Heads(),
            Tied(),
            Rope(),
            Always({}, {"bias": False}),
        ),
        INTERNLM2,
        FIELDS["internlm2"],
        in_transformers=False,
        defaults=_OWN_DEFAULTS,
    ),
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _FAMILIES}
"""The families of the library."""

# Any other model of Megatron Core's GPT: it converts between Megatron's formats only.
_ANY_GPT = Family("gpt", (), "", (), GPT)


@functools.cache
def families() -> Mapping[str, Family]:
    """All families by name: those of the library, then those of installed plug-ins.

    Raises:
        ConfigError: a plug-in cannot be used, or two families share a name or a ``model_type``.
    """
    merged = plugins.with_plugins(
        plugins.FAMILIES,
        FAMILIES,
        lambda value: isinstance(value, Family),
        "a mindspeed.models.family.Family",
    )
    of_type: dict[str, Family] = {}
    for family in merged.values():
        for kind in family.model_types:
            first = of_type.setdefault(kind, family)
            if first is not family:
                raise ConfigError(
                    f"model_type {kind!r} is declared twice: by family {first.name!r} "
                    f"({origin_of(first.name)}) and by {family.name!r} ({origin_of(family.name)})"
                )
    return merged


def origin_of(family: str) -> str:
    """The package that brings the family: ``mindspeed``, or a plug-in with its version."""
    return plugins.origin(plugins.FAMILIES, family)


def family_of_config(config: Config, where: str = "config.json") -> Family:
    """The family of a ``config.json``.

    Raises:
        ConfigError: Its ``model_type`` is not supported; names those that are.
    """
    check(config, {"model_type": TEXT}, where, ConfigError)
    wanted = config.get("model_type", "")
    known = {kind: family for family in families().values() for kind in family.model_types}
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=3)
    hint = f"; the nearest: {', '.join(near)}" if near else ""
    raise ConfigError(
        f"{where}: model_type {wanted!r} is not supported{hint}; supported are "
        f"{', '.join(sorted(known))}"
    )


def family_of_args(args: Any) -> Family:
    """The family of a model by its flags: ``--model-family``, or the first that describes it.

    Raises:
        ConfigError: No family does.
    """
    name = getattr(args, "model_family", None)
    if name:
        if name not in families():
            raise ConfigError(f"--model-family {name} is not one of {', '.join(families())}")
        return families()[name]
    for family in families().values():
        if family.describes(args):
            return family
    raise ConfigError(
        "this model has no counterpart in Hugging Face transformers; name the nearest family with "
        f"--model-family ({', '.join(families())})"
    )


def family_or_gpt(args: Any) -> Family:
    """As :func:`family_of_args`; a plain table of Megatron's parameters where no family fits.

    Raises:
        ConfigError: No family fits, and the model has latent attention.
    """
    try:
        return family_of_args(args)
    except ConfigError:
        if getattr(args, "model_family", None) or getattr(args, "multi_latent_attention", False):
            raise
        return _ANY_GPT
