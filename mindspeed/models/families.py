"""The family of a ``config.json`` or of a set of flags; families of plug-ins included."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Any

from mindspeed import plugins
from mindspeed.errors import ConfigError
from mindspeed.json_fields import TEXT, check
from mindspeed.models.config_json import Config
from mindspeed.models.dense_families import DENSE
from mindspeed.models.expert_families import EXPERTS
from mindspeed.models.family import Family
from mindspeed.models.family import differing_flags as differing_flags
from mindspeed.models.tensors import GPT

FAMILIES: Mapping[str, Family] = {family.name: family for family in DENSE + EXPERTS}
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
    """Family of flags; a plain table of Megatron's parameters where none fits.

    Raises:
        ConfigError: No family fits, and the model has latent attention.
    """
    try:
        return family_of_args(args)
    except ConfigError:
        if getattr(args, "model_family", None) or getattr(args, "multi_latent_attention", False):
            raise
        return _ANY_GPT
