"""Flags of features that do not exist yet: every door refuses them until they do.

The table follows ``docs/features.toml`` (``tests/training/test_planned_flags.py``). The change that
adds a feature deletes its line here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

from mindspeed.errors import ConfigError

# Feature, as the table of features calls it -> its flags.
FEATURES: dict[str, str] = {
    "Auto tuning: search for the parallel configuration": "--auto-tuning",
}
# What does something similar today.
INSTEAD: dict[str, str] = {}

FLAGS: dict[str, str] = {
    flag: feature for feature, flags in FEATURES.items() for flag in flags.split()
}


def problem(flag: str) -> str | None:
    """What to say about a flag, by its spelling or its name in Python; None if it is not here."""
    spelling = flag if flag.startswith("--") else "--" + flag.replace("_", "-")
    if spelling not in FLAGS:
        return None
    hint = INSTEAD.get(spelling)
    text = f"{spelling} is not available yet ({FLAGS[spelling]}): remove it"
    return f"{text}; {hint}" if hint else text


class PlannedFlag(argparse.Action):
    """Refuses its flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(problem(self.option_strings[0]) or "")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``parser`` does not know to it, in order to refuse them by name."""
    known = parser._option_string_actions
    group = parser.add_argument_group("not available yet")
    for flag in FLAGS:
        if flag not in known:
            name = flag[2:].replace("-", "_") + "_planned"
            group.add_argument(
                flag,
                action=PlannedFlag,
                nargs="*",
                dest=name,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


def refuse(names: Iterable[str]) -> None:
    """Refuse options of features that do not exist yet.

    Raises:
        ConfigError: one line for each.
    """
    if found := list(filter(None, map(problem, names))):
        raise ConfigError("\n".join(found))
