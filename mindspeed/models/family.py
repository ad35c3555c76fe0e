"""A family: what its ``config.json`` means and where its tensors go.

A ``config.json`` is read in three steps: every key is checked against the family's declared fields,
the family's class in transformers fills in what is missing, and the codecs turn the result into
flags. Our own files (presets, exports) name every key that a codec reads and need the last step
only; ``tests/models/test_presets.py`` compares the two ways.

What the entries of many families share stands at the end: sizes, gated MLPs, dropout, defaults.

Whether a model is of a family is a question of flags: those that the family's codecs read and write
must be as they say, and those that they do not mention must be off.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.json_fields import check
from mindspeed.models import extra_flags, transformers_versions
from mindspeed.models.config_fields import FIELDS, KnownFields
from mindspeed.models.config_json import (
    Always,
    Codec,
    Config,
    Fields,
    Flags,
    SoftmaxScale,
    Switches,
    normalized,
)
from mindspeed.models.stored_weights import ExpertStack
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
        fields: The keys that its ``config.json`` may have.
        in_transformers: Its class is part of transformers, which knows what missing keys mean.
        defaults: What missing keys mean that no class of transformers knows.
        prefixes: Prefixes that may be missing in files, for example ``transformer.``.
        stacks: Tensors of its files that hold matrices of all experts of a layer.
        presets: Name for ``--model`` -> complete ``config.json`` of a published model; ours are in
            ``presets.yaml``.
        config_path: Folder and name of its configuration class in transformers, where they are not
            ``name`` and that of ``architecture``.
    """

    name: str
    model_types: tuple[str, ...]
    architecture: str
    codecs: tuple[Codec, ...]
    rules: tuple[Rule, ...]
    fields: KnownFields = field(default_factory=dict)
    in_transformers: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()
    stacks: tuple[ExpertStack, ...] = ()
    presets: Mapping[str, Config] = field(default_factory=dict)
    config_path: str = ""

    @property
    def has_mtp(self) -> bool:
        """Whether its models may have layers of multi-token prediction."""
        return any("{depth}" in rule.name for rule in self.rules)

    def mtp_layers(self, config: Config) -> int:
        """Layers of multi-token prediction that a directory has, by its ``config.json``."""
        if not self.has_mtp:
            return 0
        names = ("num_nextn_predict_layers", "num_mtp_layers")
        return next((config[name] for name in names if config.get(name) is not None), 1)

    @property
    def config_class(self) -> Any:
        """The configuration class in transformers.

        Raises:
            ConfigError: transformers is not installed.
        """
        own = f"{self.name}.{self.architecture.replace('ForCausalLM', 'Config')}"
        folder, name = (self.config_path or own).split(".")
        try:
            module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
        except ImportError as error:
            absent = error.name in ("transformers", None)
            fix = "pip install 'mindspeed[suite]'" if absent else transformers_versions.advice()
            raise ConfigError(
                f"a config.json of {self.model_types[0]} is read with transformers: {fix} ({error})"
            ) from error
        return getattr(module, name)

    def read(self, config: Config, where: str = "config.json") -> Flags:
        """Megatron's flags from a ``config.json``.

        Args:
            config: The JSON object.
            where: Name of the file, for messages.

        Raises:
            ConfigError: A key is missing, its value is not allowed, or has no counterpart in
                Megatron.
        """
        check(config, {k: f.allowed for k, f in self.fields.items()}, where, ConfigError)
        try:
            return self.flags(self._completed(config))
        except ConfigError as error:
            said = str(error)
            text = (
                said.removeprefix("config.json") if said.startswith("config.json") else f": {said}"
            )
            raise ConfigError(where + text) from error

    def flags(self, config: Config) -> Flags:
        """Megatron's flags from a ``config.json`` in which no key is missing."""
        flags: Flags = {"model_family": self.name, "mask_padded_vocab": True}
        try:
            for codec in self.codecs:
                flags |= codec.read(normalized(config))
        except KeyError as error:  # null, where the class has no default
            raise ConfigError(f"config.json has no {error.args[0]}") from error
        return flags

    def _completed(self, config: Config) -> Config:
        """All keys that the codecs read, with the values that the model's class gives them.

        Only declared keys enter the class: another one could be the name of a method.
        """
        given = {
            key: config[key]
            for key, declared in self.fields.items()
            if key in config and declared.role != "no effect"
        }
        if not self.in_transformers:
            return {**self.defaults, **{k: v for k, v in given.items() if v is not None}}
        make = self.config_class
        older = not transformers_versions.gathers_spellings()
        try:
            known = transformers_versions.for_older_class(self.name, given) if older else given
            made = make(**copy.deepcopy(known))
        except ConfigError:
            raise
        except Exception as error:  # its own checks raise many types
            reason = " ".join(str(error).split())
            raise ConfigError(f"transformers refuses it: {reason}") from error
        found = {
            key: getattr(made, key)
            for key, declared in self.fields.items()
            if declared.role != "no effect" and hasattr(made, key)
        }
        if older and "rope_parameters" in self.fields:
            found["rope_parameters"] = transformers_versions.rope_parameters(given, made)
            found = {k: v for k, v in found.items() if k not in ("rope_theta", "rope_scaling")}
        if "rope_parameters" in found:  # what the class has made of all spellings
            known = {key: value for key, value in known.items() if not key.startswith("rope_")}
        return {**self.defaults, **known, **found}

    def write(self, args: Any) -> Flags:
        """A ``config.json`` from a namespace of Megatron's flags."""
        config: Flags = {"architectures": [self.architecture], "model_type": self.model_types[0]}
        if getattr(args, "objective", None) == "reward":
            scored = self.architecture.replace("ForCausalLM", "ForSequenceClassification")
            config |= {"architectures": [scored], "id2label": {"0": "reward"}}
        for codec in self.codecs:
            config |= codec.write(args)
        return config

    def describes(self, args: Any) -> bool:
        """Whether ``args`` are a model of this family: writing and reading gives them back.

        Megatron-LM's own checkpoints know the padded vocabulary only.
        """
        if not getattr(args, "vocab_size", None):
            values = {**vars(args), "vocab_size": getattr(args, "padded_vocab_size", None)}
            args = argparse.Namespace(**values)
        try:
            flags = self.flags(self.write(args))
        except (ConfigError, TypeError, AttributeError, ZeroDivisionError):
            return False
        return not differing_flags(args, flags)


# What a family that does not mention it has.
_PLAIN: Flags = {
    **extra_flags.PLAIN,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "multi_latent_attention": False,
    "num_experts": None,
    "window_size": None,
    "openai_gelu": False,
    "squared_relu": False,
    "quick_geglu": False,
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "no_rope_freq": None,
    "softmax_scale": None,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "attention_output_gate": False,
    "softmax_type": "vanilla",
    "layernorm_zero_centered_gamma": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "window_attn_skip_freq": None,
    "moe_shared_expert_gate": False,
    "moe_apply_probs_on_input": False,
    "qk_l2_norm": False,
}
# Flags that config readers set, but that leave the model the same.
_NO_ARCHITECTURE = {
    *extra_flags.NO_ARCHITECTURE,
    "model_family",
    "max_position_embeddings",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "apply_rope_fusion",
    "bias_dropout_fusion",
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
        name: (given, value)
        for name, value in sorted(expected.items())
        # A checkpoint of Megatron-LM does not know the parts that its layers lack.
        if name not in _NO_ARCHITECTURE
        and not _same(given := getattr(args, name, _PLAIN.get(name)), value)
    }


def _same(value: Any, expected: Any) -> bool:
    if isinstance(expected, list | tuple):
        return isinstance(value, list | tuple) and list(value) == list(expected)
    if isinstance(value, float) and isinstance(expected, float):
        return math.isclose(value, expected, rel_tol=1e-12)
    return bool(value == expected) or (not value and not expected)


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
