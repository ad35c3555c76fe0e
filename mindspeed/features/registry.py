"""The list of all features, and which of them are on.

:func:`resolve` turns flat values (``{"noop_layers": (0, 5), ...}``) into features, collects
every problem of every feature and raises them together, and returns the enabled ones in
attachment order. It changes nothing: ``mindspeed features --enabled -- FLAGS`` is a dry run.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, TypeVar

from packaging.version import Version

from mindspeed import plugins
from mindspeed.adaptor.versions import TESTED, megatron_version
from mindspeed.errors import ConfigError
from mindspeed.features.feature import Feature, Option, Planning, Problem, conflict, exclusions
from mindspeed.flags import (
    add_flags,
    changed_flags,
    check_value,
    default_of,
    flag,
    flags_of,
    given_names,
    record_given,
)


@dataclass(frozen=True)
class LevelOptions:
    """How much of the library may act, the one option that concerns all features.

    0: Megatron runs on this device, nothing else changes. 1: also fused operators. 2: also every
    feature whose own flag is set.
    """

    optimization_level: Literal[0, 1, 2] = flag(
        2, "0: compatibility only, 1: + fused operators, 2: + all features whose flag is set"
    )


F = TypeVar("F", bound="Feature | type[Feature]")


@lru_cache(maxsize=1)
def all_features() -> tuple[type[Feature], ...]:
    """Every feature, by name: those of the rooms of this package, and of installed plug-ins.

    Raises:
        ConfigError: a plug-in cannot be used; two features share a name or a flag, or name an
            unknown feature.
    """
    features = plugins.with_plugins(
        plugins.FEATURES,
        {feature.name: feature for feature in _built_in()},
        _is_feature,
        "a subclass of mindspeed.features.feature.Feature",
    )
    check_declarations(features.values())
    return tuple(sorted(features.values(), key=lambda feature: feature.name))


def origin_of(feature: str) -> str:
    """The package of a feature: ``mindspeed``, or a plug-in with its version."""
    return plugins.origin(plugins.FEATURES, feature)


def _built_in() -> Iterator[type[Feature]]:
    import mindspeed.features as package

    names = (info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    for module in map(importlib.import_module, names):
        for value in vars(module).values():
            if _is_feature(value) and value.__module__ == module.__name__:
                yield value


def _is_feature(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Feature) and value is not Feature


def check_declarations(features: Iterable[type[Feature]]) -> None:
    """Refuse duplicate names and flags, and references to features that do not exist."""
    features = list(features)
    names = [feature.name for feature in features]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"feature declared twice: {', '.join(twice)}")
    declared_by: dict[str, type[Feature]] = {}
    for feature in features:
        for spelling in _spellings(feature):
            first = declared_by.setdefault(spelling, feature)
            if first is not feature:
                raise ConfigError(
                    f"flag {spelling} declared twice: by {_with_origin(first)} and by "
                    f"{_with_origin(feature)}"
                )
        for other in (*feature.conflicts, *feature.requires, *feature.after):
            if other not in names:
                raise ConfigError(f"{_with_origin(feature)} refers to unknown feature '{other}'")


def planned_as(planning: Planning, values: Mapping[str, Any]) -> list[Feature]:
    """Features that are on and have this ``planning`` trait.

    Args:
        planning: The trait.
        values: Megatron's arguments and our flags by name.
    """
    kinds = [kind for kind in all_features() if planning in kind.planning]
    return [one for kind in kinds if (one := _with_values(kind, values)).enabled(values)]


def uneven_layers(values: Mapping[str, Any]) -> str:
    """The flag by which layers of one kind differ, Megatron's or a feature's; empty without one."""
    megatrons = (flag for name, flag in UNEVEN_IN_MEGATRON.items() if values.get(name))
    every = (_with_values(kind, values) for kind in all_features())
    found = (one.uneven_layers(values) for one in every if one.enabled(values))
    return next(megatrons, "") or next(filter(None, found), "")


UNEVEN_IN_MEGATRON = {
    "window_attn_skip_freq": "--window-attn-skip-freq",
    "no_rope_freq": "--no-rope-freq",
    "linear_attention_freq": "--linear-attention-freq",
    "heterogeneous_block_specs": "--heterogeneous-layers-config-path",
    "first_last_layers_bf16": "--first-last-layers-bf16",
    "cpu_offloading_num_layers": "--cpu-offloading-num-layers",
}
"""Flags of Megatron by which layers of one kind differ, by argument."""


@lru_cache
def flags_planned_as(planning: Planning) -> tuple[str, ...]:
    """Names of the flags of the features that have this ``planning`` trait."""
    kinds = [kind for kind in all_features() if planning in kind.planning]
    return tuple(item.name for kind in kinds for item in flags_of(kind))


@lru_cache
def schedule_flags() -> Mapping[str, str]:
    """Other flags that select a pipeline schedule, and the equivalent ``--pipeline-schedule``."""
    return {flags_of(kind)[0].name: kind.schedule for kind in all_features() if kind.schedule}


@lru_cache
def options(dimension: str) -> Mapping[str, Option]:
    """Values of a dimension of the planner's search that features declare, by name."""
    declared = (one for kind in all_features() for one in kind.options)
    return {one.name: one for one in declared if one.dimension == dimension}


def recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a run, changed to those of the model that its checkpoint holds."""
    found = dict(values)
    for kind in all_features():
        found |= kind.recorded(found)
    return found


def restored(recorded: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the model that a checkpoint holds, changed to those in a run (``values``)."""
    found = dict(recorded)
    for kind in all_features():
        found |= kind.restored(found, values)
    return found


def lacking_states(saved: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """States of the optimizer that a run (``values``) has, and the run of a checkpoint had not."""

    def only(kind: type[Feature], one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        on, elsewhere = (_with_values(kind, run).enabled(run) for run in (one, other))
        return on and not elsewhere

    kinds = [kind for kind in all_features() if kind.adds_states or kind.omits_states]
    return [
        *(kind.adds_states for kind in kinds if kind.adds_states and only(kind, values, saved)),
        *(kind.omits_states for kind in kinds if kind.omits_states and only(kind, saved, values)),
    ]


def conflicts_of(feature: type[Feature]) -> list[str]:
    """Features that cannot be on with this one, whichever of the two declares it."""
    declaring = (one.name for one in all_features() if feature.name in one.conflicts)
    return sorted({*feature.conflicts, *declaring})


def _spellings(feature: type[Feature]) -> Iterator[str]:
    for item in flags_of(feature):
        yield from (item.option, *item.aliases)


def _with_origin(feature: type[Feature]) -> str:
    return f"feature '{feature.name}' ({origin_of(feature.name)})"


def add_arguments(
    parser: argparse.ArgumentParser, file_values: Mapping[str, Any] | None = None
) -> argparse.ArgumentParser:
    """Add ``--optimization-level`` and the flags of all features to ``parser``; returns it.

    From now on it records which flags are given.
    """
    record_given(parser)
    add_flags(parser, LevelOptions, "mindspeed", file_values)
    for feature in all_features():
        _refuse_flags_of_the_parser(parser, feature)
        add_flags(parser, feature, f"mindspeed: {feature.name}", file_values)
    return parser


def _refuse_flags_of_the_parser(parser: argparse.ArgumentParser, feature: type[Feature]) -> None:
    """Refuse flags of Megatron-LM in a plug-in, except those declared with ``megatron=True``."""
    if origin_of(feature.name) == plugins.BUILT_IN:
        return
    for item in flags_of(feature):
        taken = [s for s in (item.option, *item.aliases) if s in parser._option_string_actions]
        if taken and not item.megatron:
            raise ConfigError(
                f"flag {taken[0]} of {_with_origin(feature)} is a flag of Megatron-LM or of the "
                "trainer already; rename it"
            )


def own_flags() -> list[str]:
    """Names of the flags that Megatron-LM does not declare itself."""
    return [
        item.name for feature in all_features() for item in flags_of(feature) if not item.megatron
    ]


@dataclass(frozen=True)
class Configuration:
    """The resolved features and their flags.

    Attributes:
        level: ``--optimization-level``.
        features: all of them by name, with the values of their flags.
        enabled: features that are on, in order.
        corrections: values of Megatron's arguments that take the place of those given.
    """

    level: int
    features: Mapping[str, Feature]
    enabled: tuple[Feature, ...]
    corrections: Mapping[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Flat ``{flag name: value}`` of all features."""
        return {
            item.name: getattr(feature, item.name)
            for feature in self.features.values()
            for item in flags_of(type(feature))
        }

    def changed_values(self) -> dict[str, Any]:
        """Flat ``{flag name: value}`` of everything that differs from its default."""
        values: dict[str, Any] = (
            {}
            if self.level == LevelOptions().optimization_level
            else {"optimization_level": self.level}
        )
        for feature in self.features.values():
            values |= {item.name: getattr(feature, item.name) for item in changed_flags(feature)}
        return values


def resolve(
    values: Mapping[str, Any],
    device: str,
    features: Iterable[type[Feature]] | None = None,
) -> Configuration:
    """Decide which features are on.

    Args:
        values: Megatron's arguments and our flags by name, all in one mapping.
        device: ``cpu``, ``cuda`` or ``npu``.
        features: defaults to all features of the library.

    Raises:
        ConfigError: all problems of all features at once, one a line.
    """
    declared = all_features() if features is None else features
    level_flag = flags_of(LevelOptions)[0]
    level = check_value(level_flag, values.get(level_flag.name, default_of(level_flag, {})))
    chosen = {feature.name: _with_values(feature, values) for feature in declared}
    wanted = [feature for feature in chosen.values() if feature.enabled(values)]
    enabled = [feature for feature in wanted if feature.level <= level]
    problems = [
        *_level_problems(wanted, level),
        *_relation_problems(enabled, values),
        *_device_problems(wanted, device),
        *_version_problems(enabled, values, megatron_version()),
    ]
    for feature in enabled:
        problems += feature.problems(values)
    if problems:
        raise ConfigError("\n".join(map(str, _each_conflict_once(problems))))
    return Configuration(level, chosen, tuple(attachment_order(enabled)))


def derived(
    values: Mapping[str, Any], features: Iterable[type[Feature]] | None = None
) -> dict[str, Any]:
    """Megatron's arguments that follow from our flags, to be set before Megatron checks them.

    Args:
        values: Megatron's arguments and our flags by name, as they were given.
        features: defaults to all features of the library.

    Raises:
        ConfigError: flags contradict each other; one problem a line.
    """
    declared = [
        feature
        for feature in (all_features() if features is None else features)
        if feature.derives is not Feature.derives  # values of others are checked by resolve
    ]
    level_flag = flags_of(LevelOptions)[0]
    level = check_value(level_flag, values.get(level_flag.name, default_of(level_flag, {})))
    found: dict[str, Any] = {}
    problems: list[str] = []
    for kind in attachment_order(declared):  # one may set flags of another
        known = {**values, **found}
        feature = _with_values(kind, known)
        if feature.level <= level and feature.enabled(known):
            if refused := _version_problems([feature], known, megatron_version()):
                problems += map(str, refused)
                continue
            try:
                found |= feature.derives(known)
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def refuse_unknown(
    names: Iterable[str], where: str = "", features: Iterable[type[Feature]] | None = None
) -> None:
    """Refuse names that are no option of ours; the error names the closest options.

    Raises:
        ConfigError: names the first unknown option, after ``where`` it was found.
    """
    features = all_features() if features is None else features
    known = {item.name for feature in features for item in flags_of(feature)}
    known |= {item.name for item in flags_of(LevelOptions)}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.4)
            hint = f"; closest: {', '.join(near)}" if near else ""
            raise ConfigError(f"{where}unknown option {name!r}{hint}")


def refuse_misspelt(names: Iterable[str]) -> None:
    """Refuse names that differ from an option of ours by a letter or by dashes.

    Args:
        names: names of arguments, which may be Megatron's or a framework's own.

    Raises:
        ConfigError: names the option that is meant.
    """
    known = {*own_flags(), *(item.name for item in flags_of(LevelOptions))}
    shortened = {part: name for name in sorted(known) for part in _shortened(name)}
    for name in sorted(set(names) - known):
        for part in _shortened(name.replace("-", "_")):
            if part in shortened:
                raise ConfigError(
                    f"unknown option {name!r}; {shortened[part]!r} is one of mindspeed's"
                )


def _shortened(name: str) -> set[str]:
    """The name and its variants without one letter, one of which similar names share."""
    return {name, *(name[:i] + name[i + 1 :] for i in range(len(name)))}


def attachment_order(features: Iterable[F]) -> list[F]:
    """Features after those they name in ``after`` and ``requires``; ties by name.

    Raises:
        ConfigError: the relations form a cycle.
    """
    by_name = {feature.name: feature for feature in features}
    graph = {
        name: sorted(other for other in (*one.after, *one.requires) if other in by_name)
        for name, one in sorted(by_name.items())
    }
    sorter = TopologicalSorter(graph)
    order: list[F] = []
    try:
        sorter.prepare()
    except CycleError as error:
        raise ConfigError(f"cyclic feature order: {' -> '.join(error.args[1])}") from error
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order += [by_name[name] for name in ready]
        sorter.done(*ready)
    return order


def _with_values(feature: type[Feature], values: Mapping[str, Any]) -> Feature:
    fields = {}
    for item in flags_of(feature):
        value = values[item.name] if item.name in values else default_of(item, {})
        fields[item.name] = check_value(item, value)
    return feature(**fields)


def _level_problems(wanted: Iterable[Feature], level: int) -> list[Problem]:
    problems = []
    for feature in wanted:
        if feature.level <= level:
            continue
        given = changed_flags(feature)
        if given:  # a feature that is on by default is left out quietly at a lower level
            problems.append(
                Problem(
                    given[0].option, f"needs --optimization-level >= {feature.level} (got {level})"
                )
            )
    return problems


def _each_conflict_once(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Drop conflicts of B with A that repeat those of A with B."""
    pairs = set()
    for problem in problems:
        if problem.other:
            pair = frozenset(words.split()[0] for words in (problem.flag, problem.other))
            if pair in pairs:
                continue
            pairs.add(pair)
        yield problem


def _shown(feature: Feature, values: Mapping[str, Any]) -> str:
    """The flag that switched a feature on, for messages; without one its name."""
    return " ".join(given_names(feature, values)[:1]) or feature.asked_by(values) or feature.name


def _relation_problems(enabled: list[Feature], values: Mapping[str, Any]) -> list[Problem]:
    given = {feature.name: _shown(feature, values) for feature in enabled}
    problems = []
    for feature in enabled:
        for other, why in feature.conflicts.items():
            if other in given:
                problems.append(conflict(given[feature.name], given[other], why))
        problems += exclusions(given[feature.name], feature.excludes, values)
        for other in feature.requires:
            if other not in given:
                what = f"needs feature '{other}'"
                problems.append(Problem(given[feature.name], what, "switch it on"))
    return problems


def _device_problems(wanted: Iterable[Feature], device: str) -> list[Problem]:
    return [
        Problem(f.name, f"does not run on {device}", f"it runs on {', '.join(f.devices)}")
        for f in wanted
        if f.devices and device not in f.devices
    ]


def _version_problems(
    enabled: Iterable[Feature], values: Mapping[str, Any], version: Version | None
) -> list[Problem]:
    problems = []
    for feature in enabled:
        if version is not None and not feature.runs_with(version):
            have = ", ".join(release for release in TESTED if feature.runs_with(release))
            message = f"does not run with megatron-core {version}"
            problems.append(Problem(_shown(feature, values), message, f"it runs with {have}"))
    return problems
