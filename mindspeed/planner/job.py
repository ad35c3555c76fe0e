"""A job to plan: its command line, with other values for some flags.

    job = Job(["--model", "llama3-70b", "--bf16", "--global-batch-size", "1024"])
    job.settings({"tensor_model_parallel_size": 8}, devices=512)    # final values, as of a dry run
    job.flags({"tensor_model_parallel_size": 8})                    # the command line to copy

Overrides are values by argument name: True sets a switch, False its negative form, None removes the
flag. Data need not exist.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
from mindspeed.errors import ConfigError
from mindspeed.features.registry import flags_planned_as
from mindspeed.training import recipe
from mindspeed.training.arguments import Parser, build_parser
from mindspeed.training.resolve import Settings


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


Overrides = Mapping[str, Any]

_NOT_PLANNED = (
    "config",  # its flags are among the words
    "nproc",
    "devices",
    "load",
    "save",
    "save_interval",
    "use_checkpoint_args",
    "pretrained_checkpoint",
    "dry_run",
)


def not_planned() -> dict[str, None]:
    """Flags of launching, of files and of in-script planning, no part of what is planned."""
    return dict.fromkeys((*_NOT_PLANNED, *flags_planned_as("no part")))


NO_EFFECT_ON_A_STEP: Mapping[str, Any] = {"lr": 1e-4, "train_iters": 1}
"""Flags that a job to plan need not have."""


@dataclass(frozen=True)
class Job:
    """A training job by its flags.

    Attributes:
        argv: flags of ``mindspeed pretrain``; ``--config`` and ``--model`` are looked up.

    Args:
        argv: these flags.
        defaults: values of flags that neither ``argv`` nor its recipe sets.
    """

    argv: tuple[str, ...]
    _parser: Parser = field(init=False, repr=False, compare=False)
    _words: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __init__(
        self, argv: Sequence[str], defaults: Mapping[str, Any] = NO_EFFECT_ON_A_STEP
    ) -> None:
        object.__setattr__(self, "argv", tuple(argv))
        parser = build_parser(with_help=False)
        parser.set_defaults(**defaults)
        object.__setattr__(self, "_parser", parser)
        object.__setattr__(self, "_words", tuple(_expanded(argv, parser)))

    def settings(self, overrides: Overrides | None = None, devices: int | None = None) -> Settings:
        """Final values of the job with some flags changed, as a start would find them.

        The features of this process are then those of the job; another call replaces them.

        Args:
            overrides: values by their names in the namespace.
            devices: ranks; default ``--nproc``, ``--devices``, else what the flags need.

        Raises:
            MindSpeedError: a start would be refused.
        """
        from mindspeed.training.initialize import prepare

        without: dict[str, Any] = dict(not_planned())
        if devices is None:
            del without["nproc"], without["devices"]
        words = ["--dry-run", *self._changed({**without, **(overrides or {})})]
        notices = io.StringIO()  # the same for every candidate
        with contextlib.redirect_stderr(notices), contextlib.redirect_stdout(notices):
            return prepare(words, devices, parser=self._parser)

    def flags(self, overrides: Overrides | None = None) -> list[str]:
        """The words of the command line with some flags changed, those of a recipe among them."""
        return self._changed(overrides or {})

    def gives(self, name: str) -> bool:
        """Whether its flags set a name of the namespace."""
        return any(dest == name for dest, _ in flags_of(self._words, self._parser))

    def command(self, overrides: Overrides | None = None) -> str:
        """:meth:`flags` as text of a shell."""
        return shlex.join(self.flags(overrides))

    def _changed(self, overrides: Overrides) -> list[str]:
        kept = [
            word
            for dest, words in flags_of(self._words, self._parser)
            if dest not in overrides
            for word in words
        ]
        given = {name: value for name, value in overrides.items() if value is not None}
        return [*kept, *recipe.flag_words(given, self._parser)]


def _expanded(argv: Sequence[str], parser: Parser) -> list[str]:
    """The command line with the words of its recipe in the recipe's place."""
    flags = list(flags_of(argv, parser))
    words = [word for dest, part in flags if dest != "config" for word in part]
    name = next((_value(part) for dest, part in reversed(flags) if dest == "config"), None)
    if name is None:
        return words
    return [*recipe.recipe_words(recipe.find(name, parser), parser, name), *words]


def _value(words: Sequence[str]) -> str:
    _, equals, value = words[0].partition("=")
    return value if equals else " ".join(words[1:])
