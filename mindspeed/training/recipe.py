"""Recipes: a YAML file with the flags of a run, grouped in sections.

    model:
      num_layers: 4
      swiglu: true
    parallel:
      tensor_model_parallel_size: 2
    training:
      micro_batch_size: 2

Keys are flag names with underscores. A recipe is turned into command line words and put in front of
the real ones, so that the same parser checks both and the command line wins.
:func:`dump` writes the resolved values of a run as a recipe that repeats it.
"""

from __future__ import annotations

import argparse
import difflib
import enum
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from mindspeed import recipes
from mindspeed.checkpoint.weights.hugging_face import tokenizer_flags
from mindspeed.errors import ConfigError
from mindspeed.flags import changed, given_in
from mindspeed.models.hf_load import folder_of, is_hf
from mindspeed.models.presets import model_flags
from mindspeed.parsing import read_yaml
from mindspeed.training import deepspeed
from mindspeed.training.arguments import TrainerParser, parse, section_of
from mindspeed.training.flag_types import DTYPES, Switch
from mindspeed.training.options import SECTIONS

ALL_SECTIONS = (*SECTIONS, "features")
# With one of these the user has chosen a tokenizer.
_TOKENIZER = {"tokenizer_type", "tokenizer_model", "vocab_file"}


def parse_with_recipe(tokens: Sequence[str], parser: TrainerParser) -> argparse.Namespace:
    """Parse flags, with those of ``--config`` below them, and those of ``--model`` below both.

    ``--load hf:DIR`` without ``--model`` takes the model's flags from there, too, and without flags
    of a tokenizer that one. Flags of the model and its tokenizer are not given
    (:func:`mindspeed.flags.given_in`): the user has named a model only.

    Raises:
        ConfigError: the recipe cannot be read, a key is unknown or in the wrong section, or a flag
            is wrong.
    """
    words, model, load, deepspeed_file = _all_words(tokens, parser)
    below: dict[str, Any] = {}
    if model is not None:
        below |= model_flags(model)
    if is_hf(load) and not _TOKENIZER & {*given_in(vars(parse(words, parser)))}:
        below |= tokenizer_flags(folder_of(load))
    named = parse(flag_words(below, parser), parser) if below else None
    if deepspeed_file is None:
        return parse(words, parser, named)
    from_file = deepspeed.read(deepspeed_file)
    args = parse([*flag_words(from_file, parser), *words], parser, named)
    deepspeed.check_agreement(deepspeed_file, from_file, args)
    missing = deepspeed.not_done(deepspeed_file)
    return changed(args, ignored_flags=[*getattr(args, "ignored_flags", []), *missing])


def given(tokens: Sequence[str], parser: TrainerParser) -> Collection[str]:
    """Names that the user has set, by words, by a file that they name or by Python."""
    return given_in(vars(parse_with_recipe(tokens, parser)))


def _all_words(
    tokens: Sequence[str], parser: TrainerParser
) -> tuple[list[str], str | None, str, str | None]:
    """The words of the recipe and the command line; the model, what is loaded, DeepSpeed's file."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    finder.add_argument("--model")
    finder.add_argument("--load")
    finder.add_argument("--deepspeed_config", "--deepspeed-config")
    words = list(tokens)
    path = finder.parse_known_args(words)[0].config
    if path is not None:
        words = [*recipe_words(find(path, parser), parser, path), *words]
    found = finder.parse_known_args(words)[0]
    model = found.model
    if model is None and is_hf(found.load):
        model = folder_of(found.load)
    return words, model, found.load or "", found.deepspeed_config


def find(name: str, parser: TrainerParser) -> Mapping[str, Any]:
    """A recipe by its file or by the name of one that comes with the package, in sections.

    Raises:
        ConfigError: there is neither, or the file is no recipe.
    """
    if Path(name).is_file():
        return read(name)
    if name in recipes.files():
        return read(str(recipes.path(name)))
    if name not in recipes.table():
        raise ConfigError(f"--config {name}: {recipes.unknown(name)}")
    table = section_of(parser)
    sections: dict[str, dict[str, Any]] = {section: {} for section in ALL_SECTIONS}
    for key, value in recipes.table()[name].items():
        sections[table[key][0]][key] = value
    return sections


def read(path: str) -> Mapping[str, Any]:
    """Read a recipe file as a mapping of sections.

    Raises:
        ConfigError: it is no YAML mapping.
    """
    recipe = read_yaml(path, f"--config {path}")
    if not isinstance(recipe, dict):
        raise ConfigError(f"--config {path}: sections are expected ({', '.join(ALL_SECTIONS)})")
    return recipe


def flag_words(flags: Mapping[str, Any], parser: TrainerParser) -> list[str]:
    """The command line that sets these values, by their names in the namespace."""
    table = section_of(parser)
    return [word for name, value in flags.items() for word in _words(table[name][1], value)]


def recipe_words(
    recipe: Mapping[str, Any], parser: TrainerParser, path: str = "recipe"
) -> list[str]:
    """The command line that is equal to ``recipe``.

    Raises:
        ConfigError: names every section and key that is unknown or misplaced.
    """
    table = section_of(parser)
    words: list[str] = []
    problems: list[str] = []
    for section, values in recipe.items():
        if section not in ALL_SECTIONS:
            problems.append(_unknown_section(str(section), table))
            continue
        if not isinstance(values, dict | None):
            problems.append(f"{section}: keys with values are expected, not {_kind(values)}")
            continue
        for key, value in (values or {}).items():
            expected_section, action = table.get(key, (None, None))
            if action is None:
                problems.append(f"{section}.{key}: unknown key{_closest(key, table)}")
            elif expected_section != section:
                problems.append(
                    f"{section}.{key}: this key belongs in section '{expected_section}'"
                )
            elif problem := _wrong_kind(action, value):
                problems.append(f"{section}.{key}: {problem}")
            else:
                words += _words(action, value)
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return words


def dump(args: argparse.Namespace, parser: TrainerParser, leave_out: Collection[str] = ()) -> str:
    """The values of a run as a recipe; sections and keys sorted as in ``--help``.

    A default that the user gave is part of it: ``--model`` may say otherwise.
    """
    given = given_in(vars(args))
    recipe: dict[str, dict[str, Any]] = {section: {} for section in ALL_SECTIONS}
    for key, (section, action) in section_of(parser).items():
        value = None if key in leave_out else getattr(args, key, None)
        shown = key in given or _always_shown(key) or value != action.default
        if value is not None and shown:
            recipe[section][key] = _plain(value)
    return to_yaml(recipe)


def to_yaml(recipe: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of a recipe; empty sections are left out."""
    return yaml.dump({k: dict(v) for k, v in recipe.items() if v}, Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Writes lists on one line, and repeats a value rather than refer to it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(list, _represent_list)


def _always_shown(key: str) -> bool:
    return key in ("seed", "micro_batch_size", "global_batch_size", "transformer_impl")


def _wrong_kind(action: argparse.Action, value: Any) -> str | None:
    """Why a YAML value has the wrong type for this flag; the parser checks its meaning."""
    switch = isinstance(action, Switch | argparse.BooleanOptionalAction) or action.nargs == 0
    if switch and not isinstance(value, bool | None):
        return f"true or false is expected, not {_kind(value)}"
    if not switch and isinstance(value, bool):
        return f"a value is expected, not {str(value).lower()}"
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if isinstance(part, dict) or (isinstance(value, list) and isinstance(part, bool | None)):
            return f"a value is expected, not {_kind(part)}"
        if isinstance(part, list) and not all(isinstance(one, int) for one in part):
            return "a value is expected, not a list in a list"
        if isinstance(part, str) and part.startswith("--"):
            return f"{part[:40]!r} would be a separate flag: values do not begin with --"
    return None


def _kind(value: Any) -> str:
    """The type of a YAML value, in words."""
    names = {dict: "a mapping", list: "a list", type(None): "nothing", bool: str(value).lower()}
    return names.get(type(value), repr(value)[:60])


def _words(action: argparse.Action, value: Any) -> list[str]:
    """Command line words that give ``action`` this value."""
    if value is None:
        return []
    if isinstance(value, bool):
        return _switch_words(action, value)
    option = next(name for name in action.option_strings if name.startswith("--"))
    if isinstance(value, list | tuple) and action.nargs is not None:
        return [option, *map(str, value)]
    if isinstance(value, list | tuple):  # a layer pattern or a pair: one word
        return [
            f"{option}={','.join(map(str, value))}" if _is_pair(action) else f"{option}={value}"
        ]
    if action.nargs is not None and action.nargs != 0:
        return [option, str(value)]
    return [f"{option}={value}"]


def _switch_words(action: argparse.Action, value: bool) -> list[str]:
    if isinstance(action, Switch):
        return [next(n for n in action.option_strings if (n not in action.negative) == value)]
    if isinstance(action, argparse.BooleanOptionalAction):
        return [next(n for n in action.option_strings if n.startswith("--no-") != value)]
    if action.nargs == 0:  # store_true
        return [action.option_strings[0]] if value else []
    raise ConfigError(f"{action.option_strings[0]} takes a value, not {str(value).lower()}")


def _is_pair(action: argparse.Action) -> bool:
    return getattr(action.type, "__name__", "") == "pair"


def _unknown_section(section: str, table: Mapping[str, Any]) -> str:
    if section in table:
        return f"'{section}' is a key of section '{table[section][0]}'"
    return f"unknown section '{section}'; sections are {', '.join(ALL_SECTIONS)}"


def _closest(key: str, table: Mapping[str, Any]) -> str:
    names = difflib.get_close_matches(str(key), table, n=3, cutoff=0.5)
    return f"; did you mean {', '.join(names)}?" if names else ""


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return next(name for name, dtype in DTYPES.items() if dtype == value)
    return list(value) if isinstance(value, tuple) else value
