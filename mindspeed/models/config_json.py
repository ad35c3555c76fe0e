"""``config.json`` <-> Megatron's flags, from one description.

A codec knows a few keys of ``config.json`` and the flags they become. :meth:`Codec.read` turns the
one into the other, :meth:`Codec.write` back; a family is a list of codecs. What a missing key means
is not said here: the family's class in transformers has filled it in before
(:meth:`mindspeed.models.family.Family.read`). Keys are written in the spelling of files older than
transformers 5, which every reader knows (see :func:`normalized`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mindspeed.errors import ConfigError

Config = Mapping[str, Any]
Flags = dict[str, Any]


class Codec(Protocol):
    """Some keys of ``config.json`` and the flags they mean."""

    def read(self, config: Config) -> Flags:
        """Flags from a normalised ``config.json``."""

    def write(self, args: Any) -> Flags:
        """Keys of ``config.json`` from a namespace of Megatron's flags."""


def normalized(config: Config) -> dict[str, Any]:
    """``config`` with the rotary settings of either spelling under ``rope_theta`` and
    ``rope_scaling``, and without keys that are null."""
    result = {key: value for key, value in config.items() if value is not None}
    rope = {**result.pop("rope_scaling", {}), **result.pop("rope_parameters", {})}
    scaling = {key: value for key, value in rope.items() if value is not None}
    if "rope_theta" in scaling:
        result["rope_theta"] = scaling.pop("rope_theta")
    kind = scaling.pop("type", None)
    scaling.setdefault("rope_type", kind or "default")
    if scaling["rope_type"] != "default":
        result["rope_scaling"] = scaling
    return result


@dataclass(frozen=True)
class Fields:
    """Flags with one key each, and the same value.

    Attributes:
        keys: Flag -> key, or several keys that mean the same; the first is written.
        optional: Flags whose key may be null.
    """

    keys: Mapping[str, str | tuple[str, ...]]
    optional: tuple[str, ...] = ()

    def read(self, config: Config) -> Flags:
        """Copy; a key that is missing is an error."""
        flags = {}
        for flag, names in self._names():
            present = [name for name in names if name in config]
            if not present and flag not in self.optional:
                raise ConfigError(f"config.json has no {names[0]}")
            flags[flag] = config[present[0]] if present else None
        return flags

    def write(self, args: Any) -> Flags:
        """Copy back."""
        return {names[0]: getattr(args, flag) for flag, names in self._names()}

    def _names(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        for flag, names in self.keys.items():
            yield flag, (names,) if isinstance(names, str) else names


@dataclass(frozen=True)
class Always:
    """Flags that every model of the family has.

    Attributes:
        flags: Flag -> value.
        keys: Key -> value that goes with it; ``fixed`` in the family's fields.
    """

    flags: Mapping[str, Any]
    keys: Mapping[str, Any] = field(default_factory=dict)

    def read(self, config: Config) -> Flags:
        """The flags."""
        return dict(self.flags)

    def write(self, args: Any) -> Flags:
        """The keys."""
        return dict(self.keys)


@dataclass(frozen=True)
class Heads:
    """Key/value heads and the size of a head.

    Attributes:
        head_size_key: Whether ``head_dim`` is written where it follows from the other sizes.
    """

    head_size_key: bool = False

    def read(self, config: Config) -> Flags:
        """Grouped-query attention only where there are fewer key/value heads."""
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        if "head_dim" not in config and hidden % heads:
            raise ConfigError(
                f"config.json: hidden_size {hidden} is not divisible by num_attention_heads {heads}"
            )
        groups = config.get("num_key_value_heads", heads)
        if heads % groups:
            raise ConfigError(
                f"config.json: num_attention_heads {heads} is not divisible by "
                f"num_key_value_heads {groups}"
            )
        flags: Flags = {"kv_channels": config.get("head_dim", hidden // heads)}
        grouped = groups != heads
        flags["group_query_attention"] = grouped
        if grouped:
            flags["num_query_groups"] = groups
        return flags

    def write(self, args: Any) -> Flags:
        """Always both numbers."""
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        keys: Flags = {"num_key_value_heads": groups}
        if self.head_size_key or args.kv_channels * args.num_attention_heads != args.hidden_size:
            keys["head_dim"] = args.kv_channels
        return keys


@dataclass(frozen=True)
class Tied:
    """``tie_word_embeddings``."""

    def read(self, config: Config) -> Flags:
        """Megatron's flag says the opposite."""
        return {"untie_embeddings_and_output_weights": not config["tie_word_embeddings"]}

    def write(self, args: Any) -> Flags:
        """The opposite of the flag."""
        return {"tie_word_embeddings": not args.untie_embeddings_and_output_weights}


def rotary_base(config: Config) -> int:
    """The base of the rotary embedding.

    Raises:
        ConfigError: There is none, or it has a fraction, which Megatron's flag cannot have.
    """
    if "rope_theta" not in config:
        raise ConfigError("config.json has no rope_theta")
    base = config["rope_theta"]
    if int(base) != base:
        raise ConfigError(
            f"config.json: rope_theta is {base}; allowed is a whole number (--rotary-base)"
        )
    return int(base)


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the rotary embedding."""

    def read(self, config: Config) -> Flags:
        """Plain, linear (positions divided by a factor) or Llama 3.1's scaling."""
        head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        if head % 2:
            raise ConfigError(f"config.json: head_dim is {head}; allowed is an even number")
        flags: Flags = {"position_embedding_type": "rope", "rotary_base": rotary_base(config)}
        scaling = config.get("rope_scaling", {})
        kind = scaling.get("rope_type")
        if kind == "llama3":
            flags |= self._llama3(scaling)
        elif kind == "linear" and (factor := scaling.get("factor")) and factor == int(factor):
            flags["rotary_seq_len_interpolation_factor"] = int(factor)
        elif scaling:
            raise ConfigError(
                f"config.json: rope_scaling is {dict(scaling)}; allowed are llama3, and linear "
                "with a whole factor"
            )
        return flags

    def _llama3(self, scaling: Config) -> Flags:
        for key, value in _LLAMA3.items():
            if scaling.get(key) != value:
                raise ConfigError(
                    f"config.json: rope_scaling.{key} is {scaling.get(key)}; Megatron Core has "
                    f"{value} built in"
                )
        if "factor" not in scaling:
            raise ConfigError("config.json has no rope_scaling.factor")
        return {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}

    def write(self, args: Any) -> Flags:
        """Base, and scaling if there is one."""
        keys: Flags = {"rope_theta": float(args.rotary_base)}
        if getattr(args, "use_rope_scaling", False):
            factor = float(args.rope_scaling_factor)
            keys["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        elif getattr(args, "rotary_seq_len_interpolation_factor", None):
            factor = float(args.rotary_seq_len_interpolation_factor)
            keys["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        return keys


_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Switches:
    """One key that switches several flags on.

    Attributes:
        key: The key, a bool.
        flags: The flags.
    """

    key: str
    flags: tuple[str, ...]

    def read(self, config: Config) -> Flags:
        """All flags alike."""
        return dict.fromkeys(self.flags, config[self.key])

    def write(self, args: Any) -> Flags:
        """True if all are on."""
        return {self.key: all(getattr(args, flag, False) for flag in self.flags)}


@dataclass(frozen=True)
class Window:
    """Sliding-window attention.

    Hugging Face counts the token itself, Megatron the keys to its left.

    Attributes:
        enabled_by: Key that must be true for the window to count, in some families.
        typed_layers: The family's class knows ``layer_types``.
    """

    enabled_by: str | None = None
    typed_layers: bool = False

    def read(self, config: Config) -> Flags:
        """No window is no flag."""
        size = config.get("sliding_window")
        if self.enabled_by and not config[self.enabled_by]:
            size = None
        kinds = set(config.get("layer_types", ()))
        if not kinds:
            # Where no class has made types of it, releases of transformers do not agree on it.
            partly = size is not None and bool(config.get("max_window_layers"))
        elif size is None:
            partly = kinds != {"full_attention"}
        else:
            partly = kinds not in ({"full_attention"}, {"sliding_attention"})
        if partly:
            raise ConfigError(
                "config.json: a sliding window in some layers only (layer_types, "
                "max_window_layers) is not supported; allowed are all layers or none"
            )
        if size is None or (self.typed_layers and kinds == {"full_attention"}):
            return {}
        return {"window_size": (size - 1, 0)}

    def write(self, args: Any) -> Flags:
        """Null without a window."""
        window = getattr(args, "window_size", None)
        keys: Flags = {"sliding_window": window[0] + 1 if window else None}
        if self.enabled_by:
            keys[self.enabled_by] = bool(window)
            if window:
                keys["max_window_layers"] = 0
        if self.typed_layers:
            kind = "sliding_attention" if window else "full_attention"
            keys["layer_types"] = [kind] * args.num_layers
        return keys
