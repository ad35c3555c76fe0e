"""Patches through which our options come in: Megatron-LM's arguments, and fields of its configs.

``add_megatron_arguments`` builds the parser; flags are added after Megatron's own.
``validate_args`` makes Megatron's values final, before any process group or module exists: right
before it our flags set values that Megatron checks, and right after it the session
(:mod:`mindspeed.session`) chooses and attaches features.

Megatron requires ``CUDA_DEVICE_MAX_CONNECTIONS=1`` with tensor or context parallelism and forbids
it with FSDP. It limits the hardware queues of an NVIDIA GPU, so on other devices Megatron's checks
get the value they require, whatever the environment says.

Frameworks hand one mapping to ``repatch`` and to the ``TransformerConfig``, such as verl its
``override_transformer_config``, and a config refuses names that it does not have. An option of ours
is accepted there if it is chosen as given, and is an attribute of the config then, as with the
original library.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from mindspeed import device
from mindspeed.adaptor.patch import Patch
from mindspeed.errors import ConfigError

OWNER = "arguments"


def script_arguments() -> argparse.Namespace | None:
    """The global arguments of a Megatron-LM script; None where a framework has set none."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)


def may_be_on(values: Mapping[str, Any], name: str) -> bool:
    """Whether an argument of Megatron's is on, or was not told."""
    return bool(values.get(name, True))


def argument_patches(
    add_flags: Callable[[argparse.ArgumentParser], argparse.ArgumentParser],
    own_flags: Callable[[], Iterable[str]],
    derive: Callable[[argparse.Namespace], None],
    configure: Callable[[argparse.Namespace], None],
) -> tuple[Patch, ...]:
    """The two patches of Megatron-LM's argument handling.

    Args:
        add_flags: adds flags to Megatron-LM's parser and returns it.
        own_flags: the names among them whose values Megatron's validation must not change.
        derive: called with the values as given; sets those that follow from our flags.
        configure: called with the validated values.
    """

    def flags_after(original: Callable[..., Any]) -> Callable[..., Any]:
        def add_megatron_arguments(parser: Any) -> Any:
            return add_flags(original(parser))

        return add_megatron_arguments

    def configure_after(original: Callable[..., Any]) -> Callable[..., Any]:
        def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
            derive(args)
            given = {name: getattr(args, name) for name in own_flags() if name in args}
            with _required_connections(args):
                result = original(args, *rest, **kwargs)
            vars(args).update(given)  # Megatron sets a few of these names, too
            configure(args)
            return result

        return validate_args

    module = "megatron.training.arguments"
    return (
        Patch(
            f"{module}:add_megatron_arguments",
            flags_after,
            OWNER,
            "flags of our features",
            expects="(parser)",
        ),
        Patch(
            f"{module}:validate_args",
            configure_after,
            OWNER,
            "features attach once Megatron's values are final",
            expects="(args, defaults)",
        ),
    )


def shown_as(kind: type[argparse.Namespace], values: Mapping[str, Any]) -> type:
    """A class of namespaces whose attributes in ``values`` are read with these values.

    ``vars()``, and so what is printed, has the values that were set; copies and pickles are
    namespaces of class ``kind`` with them.
    """

    class Arguments(kind):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            return values[name] if name in values else super().__getattribute__(name)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return kind, (), dict(vars(self))

    return Arguments


@contextlib.contextmanager
def _required_connections(args: Any) -> Iterator[None]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if device.current().name == "cuda":
        yield
        return
    given = os.environ.pop(name, None)
    fsdp = getattr(args, "use_torch_fsdp2", False) or getattr(args, "use_megatron_fsdp", False)
    if not fsdp:
        os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if given is not None:
            os.environ[name] = given


_CONFIG_OWNER = "config options"
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
        Patch(f"{config}.__init__", make, _CONFIG_OWNER, why, expects="(self, ...)")
        for config in _CONFIGS
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
