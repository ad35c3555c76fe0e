"""The families: for each, what its ``config.json`` means and where its tensors go.

To add one, write down its codecs here and its rules in :mod:`~mindspeed.models.tensors`; nothing
else in the package names a family.
Sources: the families' model classes in transformers, and for Baichuan, InternLM and Aquila, whose
code lives beside their weights, the published names of their tensors.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.models.config_json import (
    Always,
    Codec,
    Config,
    Fields,
    Flags,
    Heads,
    Rope,
    Switches,
    Tied,
    Window,
    normalized,
)
from mindspeed.models.experts_json import Latent, SigmoidExperts, SoftmaxExperts
from mindspeed.models.table import Rule
from mindspeed.models.tensors import BAICHUAN, BLOOM, DEEPSEEK, LLAMA, MIXTRAL, QWEN_MOE


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: Its name, also ``--model-family``.
        model_types: Values of ``model_type`` that belong to it; the first is written.
        architecture: Class in transformers, written to ``config.json``.
        codecs: What ``config.json`` means.
        rules: Where tensors go.
        prefixes: Prefixes that may be missing in files, for example ``transformer.``.
    """

    name: str
    model_types: tuple[str, ...]
    architecture: str
    codecs: tuple[Codec, ...]
    rules: tuple[Rule, ...]
    prefixes: tuple[str, ...] = ()

    def read(self, config: Config) -> Flags:
        """Megatron's flags from a ``config.json``.

        Raises:
            ConfigError: A key is missing, or its value has no counterpart in Megatron.
        """
        flags: Flags = {"model_family": self.name, "mask_padded_vocab": True}
        for codec in self.codecs:
            flags |= codec.read(normalized(config))
        return flags

    def write(self, args: Any) -> Flags:
        """A ``config.json`` from a namespace of Megatron's flags."""
        config: Flags = {"architectures": [self.architecture], "model_type": self.model_types[0]}
        for codec in self.codecs:
            config |= codec.write(args)
        return config

    def describes(self, args: Any) -> bool:
        """Whether ``args`` are a model of this family: writing and reading gives them back."""
        try:
            flags = self.read(self.write(args))
        except (ConfigError, KeyError, TypeError, AttributeError, ZeroDivisionError):
            return False
        return not differing_flags(args, flags)


# What a family that does not mention it has.
_PLAIN: Flags = {
    "add_qkv_bias": False,
    "add_dense_bias": False,
    "qk_layernorm": False,
    "multi_latent_attention": False,
    "num_experts": None,
    "window_size": None,
    "embed_layernorm": False,
    "lm_norm_weight": False,
    "openai_gelu": False,
    "squared_relu": False,
    "quick_geglu": False,
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
}
# Flags that config readers set, but that leave the model the same.
_NO_ARCHITECTURE = {
    "model_family",
    "mask_padded_vocab",
    "max_position_embeddings",
    "hidden_dropout",
    "attention_dropout",
    "apply_rope_fusion",
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
    "moe_token_dispatcher_type",
}


def differing_flags(args: Any, flags: Flags) -> dict[str, tuple[Any, Any]]:
    """Flags of the architecture that are not as ``flags``, from :meth:`Family.read`, say.

    Returns:
        Flag -> its value in ``args``, its value in ``flags``.
    """
    expected = {name: flags.get(name, _PLAIN.get(name)) for name in flags.keys() | _PLAIN.keys()}
    return {
        name: (getattr(args, name, None), value)
        for name, value in sorted(expected.items())
        if name not in _NO_ARCHITECTURE and not _same(getattr(args, name, None), value)
    }


def _same(value: Any, expected: Any) -> bool:
    if isinstance(expected, list | tuple):
        return isinstance(value, list | tuple) and list(value) == list(expected)
    return bool(value == expected) or (not value and not expected)


_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "layernorm_epsilon": "rms_norm_eps",
}
_GATED = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_LLAMA_LIKE: tuple[Codec, ...] = (
    Fields(_SIZES, {"layernorm_epsilon": 1e-6}),
    Always(_GATED, {"hidden_act": "silu"}),
)


@dataclass(frozen=True)
class _BloomSizes:
    """The MLP is always four times as wide, and there is no longest sequence."""

    def read(self, config: Config) -> Flags:
        return {
            "ffn_hidden_size": 4 * config["hidden_size"],
            "max_position_embeddings": config.get("seq_length", 2048),
            "kv_channels": config["hidden_size"] // _heads(config),
            "group_query_attention": False,
        }

    def write(self, args: Any) -> Flags:
        return {"seq_length": args.max_position_embeddings}


def _heads(config: Config) -> int:
    return config["n_head"] if "n_head" in config else config["num_attention_heads"]


@dataclass(frozen=True)
class _BaichuanKind:
    """7B has rotary positions, 13B ALiBi; the second generation normalises its output layer.

    Their files say it only by the way: 13B has ``model_max_length`` alone, the second generation
    has ``z_loss_weight``.
    """

    def read(self, config: Config) -> Flags:
        rotary = "max_position_embeddings" in config
        length = config["max_position_embeddings" if rotary else "model_max_length"]
        flags: Flags = {
            "max_position_embeddings": length,
            "lm_norm_weight": "z_loss_weight" in config,
        }
        return flags | (Rope().read(config) if rotary else {"position_embedding_type": "alibi"})

    def write(self, args: Any) -> Flags:
        rotary = args.position_embedding_type == "rope"
        length = args.max_position_embeddings
        keys: Flags = {"model_max_length": length}
        if rotary:
            keys |= {"max_position_embeddings": length, **Rope().write(args)}
        return keys | ({"z_loss_weight": 0} if args.lm_norm_weight else {})


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
    ),
    Family(
        "internlm",
        ("internlm",),
        "InternLMForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(),
            Tied(),
            Rope(),
            Switches("bias", ("add_qkv_bias", "add_dense_bias"), default=True),
        ),
        LLAMA,
    ),
    Family(
        "baichuan",
        ("baichuan",),
        "BaichuanForCausalLM",
        (
            Fields({k: v for k, v in _SIZES.items() if k != "max_position_embeddings"}),
            Always(_GATED, {"hidden_act": "silu"}),
            Heads(),
            Tied(),
            _BaichuanKind(),
        ),
        BAICHUAN,
    ),
    Family(
        "bloom",
        ("bloom",),
        "BloomForCausalLM",
        (
            Fields(
                {
                    "num_layers": ("n_layer", "num_hidden_layers"),
                    "num_attention_heads": ("n_head", "num_attention_heads"),
                    "hidden_size": "hidden_size",
                    "vocab_size": "vocab_size",
                    "layernorm_epsilon": "layer_norm_epsilon",
                },
                {"layernorm_epsilon": 1e-5},
            ),
            _BloomSizes(),
            Always(
                {
                    "normalization": "LayerNorm",
                    "position_embedding_type": "alibi",
                    "embed_layernorm": True,
                    "openai_gelu": True,
                    "add_bias_linear": True,
                    "add_qkv_bias": True,
                    "hidden_dropout": 0.0,
                    "attention_dropout": 0.0,
                },
                {"apply_residual_connection_post_layernorm": False},
            ),
            Tied(default=True),
        ),
        BLOOM,
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
            Window(enabled_by="use_sliding_window"),
        ),
        LLAMA,
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
            Window(enabled_by="use_sliding_window"),
        ),
        LLAMA,
    ),
    Family(
        "mistral",
        ("mistral",),
        "MistralForCausalLM",
        (*_LLAMA_LIKE, Heads(default_groups=8), Tied(), Rope(), Window()),
        LLAMA,
    ),
    Family(
        "mixtral",
        ("mixtral",),
        "MixtralForCausalLM",
        (
            *_LLAMA_LIKE,
            Heads(default_groups=8),
            Tied(),
            Rope(1e6),
            Window(),
            SoftmaxExperts("num_local_experts", own_size=False, renormalize=True),
        ),
        MIXTRAL,
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
    ),
    Family(
        "deepseek_v3",
        ("deepseek_v3",),
        "DeepseekV3ForCausalLM",
        (
            *_LLAMA_LIKE,
            Tied(),
            Latent(),
            SigmoidExperts(),
            # The norms inside latent attention have this epsilon whatever the file says.
            Always({}, {"attention_bias": False, "rms_norm_eps": 1e-6}),
        ),
        DEEPSEEK,
    ),
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _FAMILIES}


def family_of_config(config: Config) -> Family:
    """The family of a ``config.json``.

    Raises:
        ConfigError: Its ``model_type`` is not supported; names those that are.
    """
    wanted = config.get("model_type", "")
    known = {kind: family for family in _FAMILIES for kind in family.model_types}
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(str(wanted), known, n=1)
    hint = f"; the nearest is {near[0]}" if near else ""
    raise ConfigError(
        f"config.json: model_type {wanted!r} is not supported{hint}; supported are "
        f"{', '.join(sorted(known))}"
    )


def family_of_args(args: Any) -> Family:
    """The family of a model by its flags: ``--model-family``, or the first that describes it.

    Raises:
        ConfigError: No family does.
    """
    name = getattr(args, "model_family", None)
    if name:
        if name not in FAMILIES:
            raise ConfigError(f"--model-family {name} is not one of {', '.join(FAMILIES)}")
        return FAMILIES[name]
    for family in _FAMILIES:
        if family.describes(args):
            return family
    raise ConfigError(
        "this model has no counterpart in Hugging Face transformers; name the nearest family with "
        f"--model-family ({', '.join(FAMILIES)})"
    )
