"""What the entries of many families share: sizes, gated MLPs, dropout, defaults."""

from __future__ import annotations

from typing import Any

from mindspeed.models.config_fields import FIELDS
from mindspeed.models.config_json import Always, Codec, Fields, SoftmaxScale, Switches
from mindspeed.models.family import Family
from mindspeed.models.table import Rule

SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "layernorm_epsilon": "rms_norm_eps",
    "init_method_std": "initializer_range",
}
GATED = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
}
SILU = Always(GATED, {"hidden_act": "silu"})
DROPOUT = Fields({"attention_dropout": "attention_dropout"})
NO_DROPOUT = Always({"attention_dropout": 0.0})
LLAMA_LIKE: tuple[Codec, ...] = (Fields(SIZES), SILU, DROPOUT)
HYBRID = Always(
    {"qk_layernorm": True, "layernorm_zero_centered_gamma": True}, {"attention_bias": False}
)
# What a missing key means in the classes that are published next to the weights.
OWN_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
BIASES = Switches("attention_bias", ("add_qkv_bias", "add_dense_bias"))

# Of Granite.
MULTIPLIERS: tuple[Codec, ...] = (
    SoftmaxScale("attention_multiplier"),
    Fields(
        {
            "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier",
            "logits_divisor": "logits_scaling",
        }
    ),
)


def family(
    name: str, architecture: str, codecs: tuple[Codec, ...], rules: tuple[Rule, ...], **more: Any
) -> Family:
    """A family of the library, whose keys stand under its name.

    Args:
        name: Its name, and its ``model_type`` where ``more`` has no ``model_types``.
        architecture: Class in transformers.
        codecs: What ``config.json`` means.
        rules: Where tensors go.
        **more: Other fields of :class:`~mindspeed.models.family.Family`.
    """
    more = {"model_types": (name,), **more}
    return Family(
        name, architecture=architecture, codecs=codecs, rules=rules, fields=FIELDS[name], **more
    )
