"""Flags are the fields of a frozen dataclass.

    @dataclass(frozen=True)
    class SwapOptions:
        swap_attention: bool = flag(False, "offload attention activations to host memory")
        swap_modules: tuple[str, ...] = flag(("mlp",), "which modules", env="SWAP_MODULES")

``--swap-attention`` and ``--swap-modules`` follow from it. Values are taken from the command line,
else the environment variable, else a configuration file, else the default.

:func:`read` makes the dataclass of final values; :func:`changed` is a namespace with other values.

A value does not tell whether somebody gave it: the default can be typed, too. So the parser records
the names that were given (:func:`record_given`), and the record travels in the namespace.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import os
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from mindspeed.errors import ConfigError
from mindspeed.ranges import Number, Range, whole_number

GIVEN = "given_flags"
"""Name in a namespace: names that its command line has set, a list, as checkpoints may hold it."""
Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True)
class Flag:
    """Everything known of one flag: dataclass field, spellings, type and default."""

    name: str
    type: Any
    default: Any
    help: str
    env: str | None = None
    aliases: tuple[str, ...] = ()
    megatron: bool = False
    adds: tuple[str, ...] = ()
    range: Range | None = None

    @property
    def option(self) -> str:
        """The command line spelling, ``--dashes-for-underscores``."""
        return "--" + self.name.replace("_", "-")


def flag(
    default: Any,
    help: str,
    *,
    env: str | None = None,
    aliases: Sequence[str] = (),
    megatron: bool = False,
    adds: Sequence[str] = (),
    range: Range | None = None,
) -> Any:
    """A dataclass field that is also a command line flag.

    Args:
        default: the value when nobody sets it.
        help: one line for ``--help`` and the documentation.
        env: environment variable that sets it too, below the command line.
        aliases: older spellings, with dashes, each accepted.
        megatron: Megatron-LM declares this flag itself; ours is only used where Megatron's parser
            is absent, with the same name and meaning.
        adds: choices that Megatron-LM's own flag of this name does not know.
        range: of a number, or of each number of a list; every door checks it.
    """
    metadata = {
        "help": help,
        "env": env,
        "aliases": tuple(aliases),
        "megatron": megatron,
        "adds": tuple(adds),
        "range": range,
    }
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(options: type) -> tuple[Flag, ...]:
    """The flags of an options dataclass, in order."""
    return _declared(options)


@functools.cache  # a command line is resolved with the flags of all features, several times
def _declared(options: type) -> tuple[Flag, ...]:
    hints = typing.get_type_hints(options)
    return tuple(
        Flag(field.name, hints[field.name], field.default, **field.metadata)
        for field in dataclasses.fields(options)
    )


def read(options: type[Options], args: argparse.Namespace) -> Options:
    """The final values of the fields of ``options``, a dataclass of flags of ours or Megatron's.

    Args:
        args: one that lacks a flag (an older release has saved it) means the default.
    """
    values, fields = vars(args), dataclasses.fields(options)  # type: ignore[arg-type]
    return options(**{one.name: values[one.name] for one in fields if one.name in values})


def changed(args: argparse.Namespace, **values: Any) -> argparse.Namespace:
    """A copy of a namespace with other values of some flags."""
    copied = copy.copy(args)
    vars(copied).update(values)
    return copied


def add_flags(
    parser: argparse.ArgumentParser,
    options: type,
    title: str,
    defaults: Mapping[str, Any] | None = None,
    own: bool = False,
) -> None:
    """Add the flags of ``options`` to ``parser``; those that it has already are left alone.

    Args:
        parser: Megatron's parser or our own.
        options: a feature's options dataclass.
        title: heading in ``--help``.
        defaults: values of a configuration file.
        own: leave out flags that Megatron-LM declares itself.
    """
    known = parser._option_string_actions
    group = parser.add_argument_group(title)
    for item in flags_of(options):
        spellings = [item.option, *item.aliases]
        if item.option in known:
            _add_choices(known[item.option], item.adds)
            continue
        if own and item.megatron:
            continue
        default = default_of(item, defaults or {})
        group.add_argument(
            *[spelling for spelling in spellings if spelling not in known],
            dest=item.name,
            default=default,
            help=_help(item),
            **_argparse_type(item),
        )


def _help(item: Flag) -> str:
    limits = "" if item.range is None else f" ({item.range})"
    text = f"{item.help}{limits} (default: {_show(item.default)})"
    return text.replace("%", "%%")  # argparse formats it


def _add_choices(action: argparse.Action, more: Sequence[str]) -> None:
    if action.choices is not None:
        action.choices = [*action.choices, *(one for one in more if one not in action.choices)]


def record_given(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` record in every namespace the names that its words set (:func:`given_in`)."""
    found: set[str] = set()
    values_of, parse = parser._get_values, parser.parse_known_args

    def noted(action: argparse.Action, words: list[str]) -> Any:
        """Called for each flag in the words, and for positional arguments without any."""
        if action.option_strings or words:
            found.add(action.dest)
        return values_of(action, words)

    def recording(args: Any = None, namespace: Any = None) -> Any:
        found.clear()
        namespace, rest = parse(args, namespace)
        setattr(namespace, GIVEN, sorted(found & vars(namespace).keys()))  # ignored ones set none
        return namespace, rest

    vars(parser).update(_get_values=noted, parse_known_args=recording)


def given_in(values: Mapping[str, Any]) -> Collection[str]:
    """Names that the user has set; without a record, all of them.

    Args:
        values: of a namespace, or those that a program passes.
    """
    return values.get(GIVEN, values)


def changed_flags(options: object) -> list[Flag]:
    """The flags of ``options``, an instance of such a dataclass, that ask for something.

    One at its default asks for nothing, given or not.
    """
    return [one for one in flags_of(type(options)) if getattr(options, one.name) != one.default]


def default_of(item: Flag, file_values: Mapping[str, Any]) -> Any:
    """The value of a flag that the command line does not set: environment, file, default."""
    if item.env and os.environ.get(item.env):  # an empty variable is not set
        return parse_value(item, os.environ[item.env])
    return file_values.get(item.name, item.default)


def given_names(options: Any, values: Mapping[str, Any]) -> list[str]:
    """What is not at its default, as the user wrote it: ``--flag``, or an environment variable.

    Args:
        options: an instance of a feature's dataclass of flags.
        values: that it was made of.
    """
    given = given_in(values)
    return [
        item.env
        if item.env and os.environ.get(item.env) and item.name not in given
        else item.option
        for item in changed_flags(options)
    ]


def parse_value(item: Flag, text: str) -> Any:
    """Turn the text of an environment variable into the flag's type.

    Raises:
        ConfigError: the text is not of that type; names the variable or flag.
    """
    kind, many = _element(item.type)
    try:
        if kind is bool:
            return _parse_bool(text)
        values = [_parse_one(kind, part) for part in (text.split(",") if many else [text])]
    except ValueError as error:
        raise ConfigError(f"{item.env or item.option}={text!r}: {error}") from error
    return _in_range(item, tuple(values) if many else values[0])


def check_value(item: Flag, value: Any) -> Any:
    """Return ``value`` in the flag's type (a list becomes a tuple, ``3`` a float) or refuse it.

    Raises:
        ConfigError: names the flag, the value and what is allowed.
    """
    kind, many = _element(item.type)
    if value is None:
        return None
    if many:
        return _in_range(item, tuple(_check_one(item, kind, part) for part in _parts(value)))
    return _in_range(item, _check_one(item, kind, value))


def _in_range(item: Flag, value: Any) -> Any:
    if item.range is not None and (problem := item.range.problem(value)):
        raise ConfigError(f"{item.option} {problem}")
    return value


def _parts(value: Any) -> Iterator[Any]:
    """The elements of ``[1, 2]``, of ``"1,2"`` and of ``["1,2", "3"]``."""
    for part in [value] if isinstance(value, str) else value:
        if isinstance(part, str):
            yield from (piece.strip() for piece in part.split(",") if piece.strip())
        else:
            yield part


def _check_one(item: Flag, kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise ConfigError(
                f"{item.option} {value!r}: choose one of {', '.join(map(str, choices))}"
            )
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (int, float, str) and isinstance(value, str) and kind is not str:
        try:
            return kind(value)
        except ValueError:
            pass
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(
            f"{item.option} takes {_type_name(kind)}, not {value!r} ({type(value).__name__})"
        )
    return value


def _element(annotation: Any) -> tuple[Any, bool]:
    """``int | None`` -> (int, False); ``tuple[str, ...]`` -> (str, True)."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = [part for part in typing.get_args(annotation) if part is not type(None)]
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


def _argparse_type(item: Flag) -> dict[str, Any]:
    kind, many = _element(item.type)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if item.default else "store_true"}
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        return {"choices": choices, "type": type(choices[0])}
    convert: Callable[[str], Any] = kind
    # `--layers 1 2` and `--layers 1,2`: check_value separates and converts the elements.
    if many:
        return {"type": str, "nargs": "+"}
    if item.range is not None:
        name = _type_name(kind)
        convert = Number(whole_number if kind is int else kind, item.range, name)
    return {"type": convert}


def _parse_one(kind: Any, text: str) -> Any:
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        value = type(choices[0])(text)
        if value not in choices:
            raise ValueError(f"choose one of {', '.join(map(str, choices))}")
        return value
    return kind(text)


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("use 1 or 0")


def _type_name(kind: Any) -> str:
    return {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}.get(
        kind, str(kind)
    )


def _show(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
