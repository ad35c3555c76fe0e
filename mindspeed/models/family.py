"""A family: what its ``config.json`` means and where its tensors go.

Whether a model is of a family is a question of flags: those that the family's codecs read and write
must be as they say, and those that they do not mention must be off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.models.config_json import Codec, Config, Flags, normalized
from mindspeed.models.table import Rule


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

    @property
    def predicts_further_tokens(self) -> bool:
        """Whether its models may have layers of multi-token prediction."""
        return any("{depth}" in rule.name for rule in self.rules)

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
    "z_loss_weight",
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
