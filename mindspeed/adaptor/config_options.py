"""Options of this library among the fields of Megatron's ``TransformerConfig``.

Frameworks hand one mapping to ``repatch`` and to the config, such as verl its
``override_transformer_config``, and a config refuses names that it does not have. An option of ours
is accepted there if it is chosen as given, and is an attribute of the config then, as with the
original library.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.errors import ConfigError

OWNER = "config options"
_CONFIGS = (
    "megatron.core.transformer.transformer_config:TransformerConfig",
    "megatron.core.transformer.transformer_config:MLATransformerConfig",
)


def config_patches(
    own_flags: Callable[[], Collection[str]], chosen: Callable[[], Mapping[str, Any]]
) -> tuple[Patch, ...]:
    """The patches of the configs' constructors.

    Args:
        own_flags: names of the options that Megatron does not have.
        chosen: their values now; empty before any are chosen.
    """

    def make(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            fields = {field.name for field in dataclasses.fields(self)}
            unknown = kwargs.keys() - fields
            known = unknown.intersection(own_flags()) if unknown else ()
            own = {name: kwargs.pop(name) for name in known}
            for name, value in own.items():
                _check(name, value, chosen())
            original(self, *args, **kwargs)
            vars(self).update(own)

        return __init__

    why = "options of ours that a framework gives to Megatron's config are those that are chosen"
    return tuple(
        Patch(f"{config}.__init__", make, OWNER, why, expects="(self, ...)") for config in _CONFIGS
    )


def _check(name: str, value: Any, chosen: Mapping[str, Any]) -> None:
    if name not in chosen:
        raise ConfigError(
            f"TransformerConfig got {name}={value!r}, an option of mindspeed, before any were "
            "chosen: call mindspeed.megatron_adaptor.repatch with it first"
        )
    if chosen[name] != value:
        raise ConfigError(
            f"TransformerConfig got {name}={value!r}, but mindspeed runs with {chosen[name]!r}: "
            "give the same value to mindspeed.megatron_adaptor.repatch"
        )
