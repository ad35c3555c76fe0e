"""The words of a command line, and those of a script with other values for some flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed.errors import ConfigError


def changed_words(
    words: Sequence[str], parser: argparse.ArgumentParser, overrides: Mapping[str, Any]
) -> list[str]:
    """A command line with some flags replaced, added or taken away.

    Args:
        words: the command line.
        parser: all flags of the script.
        overrides: values by their names in the namespace; None takes a flag away.

    Raises:
        ConfigError: no flag of the script sets a name to its value.
    """
    kept = [
        word for dest, part in flags_of(words, parser) if dest not in overrides for word in part
    ]
    given = {name: value for name, value in overrides.items() if value is not None}
    return [*kept, *(word for name in given for word in _words(parser, name, given[name]))]


def _words(parser: argparse.ArgumentParser, name: str, value: Any) -> list[str]:
    actions = [action for action in parser._actions if action.dest == name]
    for action in actions:
        if action.option_strings and action.nargs != 0:
            values = value if isinstance(value, list | tuple) else [value]
            return [action.option_strings[0], *map(str, values)]
        if action.option_strings and action.const == value:
            return [action.option_strings[0]]
    if any(action.default == value for action in actions):  # a switch that is off already
        return []
    raise ConfigError(f"no flag of the script sets {name} to {value}")


def flags_of(
    words: Sequence[str], parser: argparse.ArgumentParser
) -> Iterator[tuple[str, list[str]]]:
    """Each flag of a command line: its name in the namespace and its words."""
    known = parser._option_string_actions
    part: list[str] = []
    for word in [*words, "--"]:
        if word.startswith("--") and part:
            action = known.get(part[0].partition("=")[0])
            yield (action.dest if action is not None else part[0]), part
            part = []
        part.append(word)
