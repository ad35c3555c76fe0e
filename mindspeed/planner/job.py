"""A job to plan, as a command line in which flags can be changed.

    job = Job(["--model", "llama3-70b", "--bf16", "--global-batch-size", "1024"])
    job.settings({"tensor_model_parallel_size": 8}, devices=512)    # final values, as of a dry run
    job.flags({"tensor_model_parallel_size": 8})                    # the command line to copy

Overrides are values by argument name: True sets a switch, False its negative form, None removes the
flag. The job's data need not exist.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
from mindspeed.errors import ConfigError
from mindspeed.features.registry import flags_planned_as
from mindspeed.flags import changed
from mindspeed.planner.expert_loads import BALANCED, ExpertLoads
from mindspeed.training import recipe
from mindspeed.training.arguments import TrainerParser, build_parser
from mindspeed.training.resolve import Settings


def changed_words(
    words: Sequence[str], parser: argparse.ArgumentParser, overrides: Mapping[str, Any]
) -> list[str]:
    """Replace, add or remove flags of a script's command line.

    Args:
        overrides: values by argument name; None removes a flag.

    Raises:
        ConfigError: no flag of the script sets an argument to its value.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    added = [word for name in given for word in _words(parser, name, given[name])]
    return [*_other_words(words, parser, overrides), *added]


def _other_words(
    words: Sequence[str], parser: argparse.ArgumentParser, overrides: Mapping[str, Any]
) -> list[str]:
    """The words of the flags that are not overridden."""
    flags = flags_of(words, parser)
    return [word for dest, part in flags if dest not in overrides for word in part]


def _words(parser: argparse.ArgumentParser, name: str, value: Any) -> list[str]:
    actions = [action for action in parser._actions if action.dest == name]
    for action in actions:
        if action.option_strings and action.nargs != 0:
            values = value if isinstance(value, list | tuple) else [value]
            return [action.option_strings[0], *map(str, values)]
        if action.option_strings and action.const == value:
            return [action.option_strings[0]]
    if any(action.default == value for action in actions):  # a switch that is off by default
        return []
    raise ConfigError(f"no flag of the script sets {name} to {value}")


def flags_of(
    words: Sequence[str], parser: argparse.ArgumentParser
) -> Iterator[tuple[str, list[str]]]:
    """Yield the argument name and the words of each flag of a command line."""
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
    """Arguments that a plan ignores: of the launch, of files and of planning in a script."""
    return dict.fromkeys((*_NOT_PLANNED, *flags_planned_as("no part")))


NO_EFFECT_ON_A_STEP: Mapping[str, Any] = {"lr": 1e-4, "train_iters": 1}
"""Default values of required flags that do not change a step."""


class Job:
    """A training job by its flags.

    Args:
        defaults: values of flags that neither ``argv`` nor its recipe sets.

    Attributes:
        argv: flags of ``mindspeed pretrain``, with ``--config`` and ``--model``.
        loads: what is assumed about the tokens of experts.
    """

    loads: ExpertLoads = BALANCED

    def __init__(
        self, argv: Sequence[str], defaults: Mapping[str, Any] = NO_EFFECT_ON_A_STEP
    ) -> None:
        self.argv = tuple(argv)
        self._parser: Any = build_parser(with_help=False)
        self._parser.set_defaults(**defaults)
        self._words = tuple(_expanded(argv, self._parser))

    def settings(self, overrides: Overrides | None = None, devices: int | None = None) -> Settings:
        """Final values of the job with some flags changed.

        Attaches the features of the job in this process; another call replaces them.

        Args:
            overrides: values by argument name.
            devices: number of ranks; default: ``--nproc``, ``--devices``, else the smallest that
                the flags allow.

        Raises:
            MindSpeedError: the job cannot start.
        """
        from mindspeed.training.initialize import prepare

        without: dict[str, Any] = dict(not_planned())
        if devices is None:
            del without["nproc"], without["devices"]
        words = ["--dry-run", *self.flags({**without, **(overrides or {})})]
        notices = io.StringIO()  # repeated for every candidate
        with contextlib.redirect_stderr(notices), contextlib.redirect_stdout(notices):
            settings = prepare(words, devices, parser=self._parser)
        return self._assumed(settings)

    def with_loads(self, loads: ExpertLoads) -> Job:
        """The job, planned with these loads of experts."""
        return self._with(loads=loads)

    def changed(self, flags: Overrides) -> Job:
        """The job with other values of some flags, by argument name."""
        if not flags:
            return self
        words = tuple(self.flags(flags))
        return self._with(argv=words, _words=words)

    def _with(self, **values: Any) -> Job:
        changed = copy.copy(self)
        vars(changed).update(values)
        return changed

    def _assumed(self, settings: Settings) -> Settings:
        self.loads.check(settings.args)
        return replace(settings, args=changed(settings.args, expert_loads=self.loads))

    def flags(self, overrides: Overrides | None = None) -> list[str]:
        """The words of the command line with some flags changed; recipes are expanded."""
        overrides = overrides or {}
        given = {name: value for name, value in overrides.items() if value is not None}
        added = recipe.flag_words(given, self._parser)
        return [*_other_words(self._words, self._parser, overrides), *added]

    def gives(self, name: str) -> bool:
        """Whether the command line or its recipe sets an argument."""
        return any(dest == name for dest, _ in flags_of(self._words, self._parser))

    def command(self, overrides: Overrides | None = None) -> str:
        """:meth:`flags` as shell text."""
        return shlex.join(self.flags(overrides))


def _expanded(argv: Sequence[str], parser: TrainerParser) -> list[str]:
    """Replace the recipe of a command line by its flags."""
    flags = list(flags_of(argv, parser))
    words = [word for dest, part in flags if dest != "config" for word in part]
    name = next((_value(part) for dest, part in reversed(flags) if dest == "config"), None)
    if name is None:
        return words
    return [*recipe.recipe_words(recipe.find(name, parser), parser, name), *words]


def _value(words: Sequence[str]) -> str:
    _, equals, value = words[0].partition("=")
    return value if equals else " ".join(words[1:])
