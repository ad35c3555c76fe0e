"""What differs between releases of transformers, and the oldest that is used.

A ``config.json`` means the same with each of them: what classes of transformers 5 gather from the
spellings of a file is gathered here for older ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from mindspeed.errors import ConfigError

OLDEST = "4.57.1"
"""The oldest release that is tested; also the lower bound in pyproject.toml."""

_ROPE = ("rope_parameters", "rope_scaling")
# Second names of one number, which older classes keep beside the first.
_ALIASES: Mapping[str, tuple[str, str]] = {
    "mixtral": ("num_experts", "num_local_experts"),
    "qwen3_moe": ("num_local_experts", "num_experts"),
    "deepseek_v3": ("num_local_experts", "n_routed_experts"),
}


def at_least(release: str) -> bool:
    """Whether the installed transformers is ``release`` or newer."""
    return Version(release) <= Version(version("transformers"))


def gathers_spellings() -> bool:
    """Whether a class knows all spellings of a key, and ``rope_parameters``."""
    return at_least("5")


def advice() -> str:
    """What to do about a model that the installed transformers does not know."""
    if gathers_spellings():
        return "install a newer transformers"
    return f"transformers is {version('transformers')}: install transformers 5"


def check_spelling(config: Mapping[str, Any], where: str) -> None:
    """See that the installed transformers computes what a ``config.json`` says.

    Raises:
        ConfigError: It passes over ``rope_parameters``.
    """
    if "rope_parameters" in config and not gathers_spellings():
        raise ConfigError(
            f"{where}: transformers {version('transformers')} computes without rope_parameters of "
            "its config.json: install transformers 5"
        )


def for_older_class(family: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file as an older class takes them."""
    keys = {key: value for key, value in given.items() if key not in _ROPE}
    alias, name = _ALIASES.get(family, ("", ""))
    if keys.get(alias) is not None:
        keys[name] = keys[alias]
    keys.pop(alias, None)
    return keys


def rope_parameters(given: Mapping[str, Any], made: Any) -> dict[str, Any]:
    """The rotary settings of a file, as a class of transformers 5 keeps them.

    Args:
        given: Keys of the file.
        made: Configuration of an older class.

    Raises:
        ConfigError: Layers have settings of their own.
    """
    rope = dict(given.get("rope_scaling") or given.get("rope_parameters") or {})
    if nested := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise ConfigError(
            f"config.json: rope_parameters has settings of their own for {', '.join(nested)}; "
            f"allowed is one set for all layers; {advice()}"
        )
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", made.rope_theta)
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        rope.setdefault("original_max_position_embeddings", made.max_position_embeddings)
    return rope
