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
from mindspeed.models.rope_parameters import RopeParameters
from mindspeed.models.transformers_versions import advice, gathers_spellings
from mindspeed.profiling.model_flops import linear_pattern

Config = Mapping[str, Any]
Flags = dict[str, Any]


class Codec(Protocol):
    """Some keys of ``config.json`` and the flags they mean."""

    def read(self, config: Config) -> Flags:
        """Flags from a normalised ``config.json``."""

    def write(self, args: Any) -> Flags:
        """Keys of ``config.json`` from a namespace of Megatron's flags."""


def normalized(config: Config) -> dict[str, Any]:
    """``config`` with the rotary settings of either spelling under ``rope_theta``,
    ``partial_rotary_factor`` and ``rope_scaling``, and without keys that are null."""
    result = {key: value for key, value in config.items() if value is not None}
    kinds = result.get("rope_parameters", {})
    if any(isinstance(settings, Mapping) for settings in kinds.values()):
        return result  # of each kind of layer, see LocalRope
    rope = {**result.pop("rope_scaling", {}), **result.pop("rope_parameters", {})}
    scaling = {key: value for key, value in rope.items() if value is not None}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in scaling:
            result[key] = scaling.pop(key)
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
    """Base and scaling of the rotary embedding.

    Attributes:
        interleaved: Channels 2i and 2i + 1 are a pair, not i and i + d/2.
        partial: The family's files may say that a part of each head is not rotated.
        own_length: Its class takes ``original_max_position_embeddings`` from a key of its own.
    """

    interleaved: bool = False
    partial: bool = False
    own_length: bool = False

    def read(self, config: Config) -> Flags:
        """Megatron's own flags where they say it, else ``--rope-parameters``."""
        head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        part = config.get("partial_rotary_factor", 1.0)
        rotated = int(head * part)
        if rotated % 2 or not rotated:
            what = f"head_dim is {head}" + (f", partial_rotary_factor {part}" if part != 1 else "")
            raise ConfigError(
                f"config.json: {what}; allowed is an even number of rotated channels"
                if part != 1
                else f"config.json: {what}; allowed is an even number"
            )
        flags: Flags = {"position_embedding_type": "rope", "rotary_base": rotary_base(config)}
        if self.partial:
            flags["rotary_percent"] = float(part)
        if self.interleaved:
            flags["rotary_interleaved"] = True
        scaling = config.get("rope_scaling", {})
        kind, factor = scaling.get("rope_type"), scaling.get("factor")
        if not scaling:
            pass
        elif kind == "llama3" and all(scaling.get(key) == _LLAMA3[key] for key in _LLAMA3):
            if not factor:
                raise ConfigError("config.json has no rope_scaling.factor")
            flags |= {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}
        elif kind == "linear" and factor and factor == int(factor):
            flags["rotary_seq_len_interpolation_factor"] = int(factor)
        else:
            longest = config.get("max_position_embeddings")
            flags["rope_parameters"] = RopeParameters.read(
                scaling, longest, "config.json: rope_scaling"
            ).text()
        return flags

    def write(self, args: Any) -> Flags:
        """Base, the part that is rotated, and scaling if there is one."""
        keys: Flags = {"rope_theta": float(args.rotary_base)}
        if self.partial:
            keys["partial_rotary_factor"] = args.rotary_percent
        if getattr(args, "use_rope_scaling", False):
            factor = float(args.rope_scaling_factor)
            keys["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        elif getattr(args, "rotary_seq_len_interpolation_factor", None):
            factor = float(args.rotary_seq_len_interpolation_factor)
            keys["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        elif text := getattr(args, "rope_parameters", None):
            scaling = RopeParameters.of(text)
            keys["rope_scaling"] = scaling.keys()
            if self.own_length:
                length = scaling.original_max_position_embeddings
                keys["original_max_position_embeddings"] = length
            if scaling.rope_type == "dynamic":
                keys["max_position_embeddings"] = scaling.original_max_position_embeddings
        return keys


@dataclass(frozen=True)
class LocalRope:
    """A rotary embedding for layers with a window and another one for those without.

    Attributes:
        local_key: Key of files older than transformers 5 with the base of layers with a window;
            None: only transformers 5 reads another base than the class's own.
    """

    local_key: str | None = None

    def read(self, config: Config) -> Flags:
        """Read as :class:`Rope` does, and ``--local-rotary-base`` where the two differ."""
        kinds = config.get("rope_parameters", {})
        names = ("full_attention", "sliding_attention")
        if missing := [name for name in names if not kinds.get(name)]:
            older = "" if gathers_spellings() else f"; {advice()}"
            raise ConfigError(f"config.json: rope_parameters has no {missing[0]}{older}")
        plain = {key: value for key, value in config.items() if not key.startswith("rope_")}
        flags, local = (
            Rope().read(normalized({**plain, "rope_parameters": kinds[name]})) for name in names
        )
        if local["rotary_base"] != local_base(local):
            raise ConfigError(
                "config.json: rope_parameters.sliding_attention is scaled; allowed is rope_type "
                "default"
            )
        if local != flags:
            flags["local_rotary_base"] = local["rotary_base"]
        return flags

    def write(self, args: Any) -> Flags:
        """Write the spelling that every release of transformers reads, where there is one."""
        keys, base = Rope().write(args), float(args.local_rotary_base or args.rotary_base)
        if self.local_key:
            return {**keys, self.local_key: base}
        theta, scaling = keys.pop("rope_theta"), keys.pop("rope_scaling", {})
        kinds = {
            "full_attention": {"rope_type": "default", "rope_theta": theta, **scaling},
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        }
        return {**keys, "rope_parameters": kinds}


def local_base(flags: Flags) -> int | None:
    """The base of a rotary embedding that nothing scales; None where something does."""
    scaled = flags.keys() - {"position_embedding_type", "rotary_base"}
    return None if scaled else flags["rotary_base"]


@dataclass(frozen=True)
class SoftmaxScale:
    """The factor on attention scores, where a file says it.

    Attributes:
        power: Power of the key's value that is the factor.
    """

    key: str
    power: float = 1.0

    def read(self, config: Config) -> Flags:
        """The factor."""
        return {"softmax_scale": float(config[self.key]) ** self.power}

    def write(self, args: Any) -> Flags:
        """The key, where its power is not 1 as the whole number that files have."""
        value = args.softmax_scale ** (1 / self.power)
        return {self.key: value if self.power == 1.0 else round(value)}


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
class WindowField:
    """Sliding-window attention.

    Hugging Face counts the token itself, Megatron the keys to its left.

    Attributes:
        enabled_by: Key that must be true for the window to count, in some families.
        typed_layers: The family's class knows ``layer_types``.
        max_layers: It knows ``max_window_layers``, too.
    """

    enabled_by: str | None = None
    typed_layers: bool = False
    max_layers: bool = True

    def read(self, config: Config) -> Flags:
        """No window is no flag; a pattern only where some layers have none."""
        size = config.get("sliding_window")
        if self.enabled_by and not config[self.enabled_by]:
            size = None
        kinds = config.get("layer_types", ())
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            raise ConfigError(
                f"config.json: layer_types has {', '.join(sorted(unknown))}; allowed are "
                "full_attention and sliding_attention"
            )
        pattern = [int(kind == "sliding_attention") for kind in kinds]
        # Where no class has made types of it, releases of transformers do not agree on it.
        untyped = not kinds and size is not None and bool(config.get("max_window_layers"))
        if untyped or (size is None and any(pattern)):
            raise ConfigError(
                "config.json: a sliding window in some layers only needs layer_types, one word a "
                "layer, and sliding_window"
            )
        if size is None or (self.typed_layers and not any(pattern)):
            return {}
        flags: Flags = {"window_size": (size - 1, 0)}
        if self.typed_layers and not all(pattern):
            flags["window_attn_skip_freq"] = pattern
        elif len(set(pattern)) > 1:
            raise ConfigError(
                "config.json: layer_types has two kinds, which this family's class does not know; "
                "allowed is one"
            )
        return flags

    def write(self, args: Any) -> Flags:
        """Null without a window."""
        window = getattr(args, "window_size", None)
        keys: Flags = {"sliding_window": window[0] + 1 if window else None}
        if self.enabled_by:
            keys[self.enabled_by] = bool(window)
            if window and self.max_layers:
                keys["max_window_layers"] = 0
        if self.typed_layers:
            every = [int(bool(window))] * args.num_layers
            pattern = getattr(args, "window_attn_skip_freq", None) or every
            kinds = ("full_attention", "sliding_attention")
            keys["layer_types"] = [kinds[bool(has_window)] for has_window in pattern]
        return keys


@dataclass(frozen=True)
class NoRopeLayers:
    """Layers without positions (SmolLM3)."""

    def read(self, config: Config) -> Flags:
        """Megatron's pattern says which layers lack them, the file's which have them."""
        pattern = [int(not used) for used in config["no_rope_layers"]]
        if len(pattern) != config["num_hidden_layers"]:
            raise ConfigError(
                f"config.json: no_rope_layers has {len(pattern)} entries; allowed are "
                f"num_hidden_layers, {config['num_hidden_layers']}"
            )
        return {"no_rope_freq": pattern} if any(pattern) else {}

    def write(self, args: Any) -> Flags:
        """One entry a layer."""
        pattern = getattr(args, "no_rope_freq", None) or [0] * args.num_layers
        return {"no_rope_layers": [int(not lacks) for lacks in pattern]}


@dataclass(frozen=True)
class Chunks:
    """Chunks in layers with positions, and a temperature in those without (Llama 4)."""

    def read(self, config: Config) -> Flags:
        """Flags; chunks in other layers are refused."""
        used = config["no_rope_layers"][: config["num_hidden_layers"]]
        kinds = config["layer_types"]
        chunked = ["chunked_attention" if rotated else "full_attention" for rotated in used]
        flags: Flags = {}
        if kinds == chunked and any(used):
            flags["attention_chunk_size"] = config["attention_chunk_size"]
        elif set(kinds) != {"full_attention"}:
            raise ConfigError(
                "config.json: layer_types is another than no_rope_layers; allowed are "
                "chunked_attention where that is 1, full_attention elsewhere, or everywhere"
            )
        if config["attn_temperature_tuning"] and not all(used):
            flags["nope_temperature"] = float(config["attn_scale"])
            flags["nope_temperature_floor"] = config["floor_scale"]
        return flags

    def write(self, args: Any) -> Flags:
        """The same keys."""
        lacking = getattr(args, "no_rope_freq", None) or [0] * args.num_layers
        words = ["full_attention" if lacks else "chunked_attention" for lacks in lacking]
        if not args.attention_chunk_size:
            words = ["full_attention"] * args.num_layers
        keys: Flags = {"layer_types": words, "attn_temperature_tuning": False}
        if args.attention_chunk_size:
            keys["attention_chunk_size"] = args.attention_chunk_size
        if args.nope_temperature:
            keys |= {"attn_temperature_tuning": True, "attn_scale": args.nope_temperature}
            keys["floor_scale"] = args.nope_temperature_floor
        return keys


@dataclass(frozen=True)
class DeltaNetKeys:
    """Layers with linear attention, and a gate on the attention of the others (Qwen3-Next)."""

    _FIELDS = Fields(
        {
            "linear_conv_kernel_dim": "linear_conv_kernel_dim",
            "linear_key_head_dim": "linear_key_head_dim",
            "linear_value_head_dim": "linear_value_head_dim",
            "linear_num_key_heads": "linear_num_key_heads",
            "linear_num_value_heads": "linear_num_value_heads",
        }
    )

    def read(self, config: Config) -> Flags:
        """Sizes, and a pattern of the layers."""
        flags = self._FIELDS.read(config)
        if flags["linear_num_value_heads"] % flags["linear_num_key_heads"]:
            raise ConfigError(
                f"config.json: linear_num_value_heads {flags['linear_num_value_heads']} is not "
                f"divisible by linear_num_key_heads {flags['linear_num_key_heads']}"
            )
        kinds = config["layer_types"]
        if unknown := set(kinds) - {"full_attention", "linear_attention"}:
            raise ConfigError(
                f"config.json: layer_types has {', '.join(sorted(unknown))}; allowed are "
                "full_attention and linear_attention"
            )
        return flags | {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(kind == "linear_attention") for kind in kinds],
            "attention_output_gate": True,
        }

    def write(self, args: Any) -> Flags:
        """Sizes, and a word for each layer."""
        kinds = ("full_attention", "linear_attention")
        words = [kinds[linear] for linear in linear_pattern(vars(args))]
        return self._FIELDS.write(args) | {"layer_types": words}
