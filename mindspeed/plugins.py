"""Features, model families, evaluation tasks and devices that other installed packages bring.

A package names its objects under entry points, in its ``pyproject.toml``:

    [project.entry-points."mindspeed.features"]
    weight-noise = "acme.weight_noise:WeightNoise"

The entry point has the name of the object; for a device it is the value of ``MINDSPEED_DEVICE``.
A group is loaded once, when its list is first needed; of the devices, the selected one only. An
entry point that cannot be loaded is an error that names its package: without an installed feature a
run would silently differ.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any, TypeVar

from mindspeed.errors import ConfigError

DEVICES = "mindspeed.devices"
FAMILIES = "mindspeed.families"
FEATURES = "mindspeed.features"
TASKS = "mindspeed.tasks"
GROUPS = (DEVICES, FAMILIES, FEATURES, TASKS)

BUILT_IN = "mindspeed"
"""The origin of what is part of this library."""

T = TypeVar("T")


@functools.cache
def entry_points(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of ``group`` by name, in alphabetical order.

    Raises:
        ConfigError: two packages use the same name; names both.
    """
    found: dict[str, EntryPoint] = {}
    for entry in sorted(all_entry_points().select(group=group), key=_name_and_value):
        if entry.name in found:
            raise _clash(group, entry.name, _describe(found[entry.name]), _describe(entry))
        found[entry.name] = entry
    return found


@functools.cache
def all_entry_points() -> Any:
    """Those of all packages, whose files are read once; a class of its own before Python 3.12."""
    return importlib.metadata.entry_points()


def origin(group: str, name: str) -> str:
    """The package that brings ``name``, with its version; :data:`BUILT_IN` for our own."""
    entry = entry_points(group).get(name)
    return BUILT_IN if entry is None else _package(entry)


def with_plugins(
    group: str, built_in: Mapping[str, T], accepts: Callable[[Any], bool], expected: str
) -> dict[str, T]:
    """Our own objects by name, and after them those of the entry points in ``group``.

    Args:
        group: one of :data:`GROUPS`.
        built_in: our own.
        accepts: whether an entry point's object is of the right type.
        expected: that type in words, for the message.

    Raises:
        ConfigError: an entry point uses the name of another one or of one of ours, cannot be
            loaded, or brings an object of another type or name.
    """
    merged = dict(built_in)
    for name in entry_points(group):
        if name in built_in:
            raise _clash(group, name, BUILT_IN, _describe(entry_points(group)[name]))
        value: Any = load(group, name, accepts, expected)
        if value.name != name:
            reason = f"its object has the name {value.name!r}, not {name!r}"
            raise _unusable(group, entry_points(group)[name], reason)
        merged[name] = value
    return merged


def load(group: str, name: str, accepts: Callable[[Any], bool], expected: str) -> Any:
    """The object of one entry point.

    Args:
        group: one of :data:`GROUPS`.
        name: of the entry point.
        accepts: whether the object is of the right type.
        expected: that type in words, for the message.

    Raises:
        ConfigError: it cannot be loaded, or is of another type.
    """
    entry = entry_points(group)[name]
    try:
        value = entry.load()
    except Exception as error:  # the package's own code runs: anything can happen
        reason = " ".join(str(error).split())
        raise _unusable(group, entry, f"{type(error).__name__}: {reason}") from error
    if not accepts(value):
        raise _unusable(group, entry, f"it is a {type(value).__name__}, not {expected}")
    return value


def installed() -> tuple[str, ...]:
    """One line for every entry point of all groups; nothing is loaded."""
    return tuple(
        f"{group}: {_describe(entry)}" for group in GROUPS for entry in entry_points(group).values()
    )


def require_same_on_all_ranks() -> None:
    """Compare the entry points of all ranks: one ``all_gather_object`` over all of them.

    Raises:
        ConfigError: on every rank, when they differ; names the missing plug-in and the ranks.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    of_rank: list[tuple[str, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(of_rank, installed())
    for line in sorted({line for lines in of_rank for line in lines}):
        missing = [str(rank) for rank, lines in enumerate(of_rank) if line not in lines]
        if missing:
            shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise ConfigError(
                f"the ranks have different plug-ins: {line} is not installed on rank {shown}; "
                "install the same packages on all hosts"
            )


def _name_and_value(entry: EntryPoint) -> tuple[str, str]:
    return entry.name, entry.value


def _package(entry: EntryPoint) -> str:
    known = entry.dist
    return "an unnamed package" if known is None else f"{known.name} {known.version}"


def _describe(entry: EntryPoint) -> str:
    return f"{_package(entry)} ({entry.name} = {entry.value})"


def _clash(group: str, name: str, first: str, second: str) -> ConfigError:
    return ConfigError(
        f"{group}: {name!r} is declared twice, by {first} and by {second}; rename one of them or "
        "uninstall its package"
    )


def _unusable(group: str, entry: EntryPoint, reason: str) -> ConfigError:
    name = "PACKAGE" if entry.dist is None else entry.dist.name
    return ConfigError(
        f"{group}: cannot use {_describe(entry)}: {reason}; repair the package or remove it with "
        f"`pip uninstall {name}`"
    )
