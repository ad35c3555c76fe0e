"""The range of a number is declared where its flag is, and one check enforces it.

    flag(0.1, "dropout", range=PROBABILITY)                       a field of an options dataclass
    parser.add_argument("--workers", type=whole(1), default=1)    a flag of a command

No range contains ``nan``; infinity is allowed only where it is named. Help texts show the range.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NoReturn

from mindspeed.errors import ConfigError

MAX_SIZE = 2**31 - 1
MAX_COUNT = 2**63 - 1
MAX_RANKS = 1_000_000
_LONGEST = 40  # characters of a wrong value that a message repeats


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``.

    Attributes:
        low: smallest value.
        high: largest value.
        above: ``low`` itself does not belong to it.
        below: ``high`` itself does not belong to it.
        also: special values outside the range, such as -1 or infinity.
        shown: whether messages name ``high``; limits of a number format are not named.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    also: tuple[float, ...] = ()
    shown: bool = True

    def __contains__(self, value: float) -> bool:
        if value in self.also:
            return True
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if isinstance(value, int) and value.bit_length() > 1000:  # no float holds it
            return False
        over = value > self.low if self.above else value >= self.low
        return over and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        closed = not (self.above or self.below) and math.isfinite(self.low)
        if closed and self.shown and math.isfinite(self.high):
            return f"from {_shown(self.low)} to {_shown(self.high)}" + self._exceptions()
        parts = []
        if self.low != -math.inf:
            parts.append(f"{'greater than' if self.above else 'at least'} {self.low:g}")
        if self.high != math.inf and self.shown:
            parts.append(f"{'less than' if self.below else 'at most'} {_shown(self.high)}")
        text = " and ".join(parts) or "a finite number"
        return text + self._exceptions()

    def _exceptions(self) -> str:
        return f", or {' or '.join(map(_shown, self.also))}" if self.also else ""

    def problem(self, value: Any) -> str | None:
        """Why ``value`` (a number or nested lists) is out of range; None if it is not."""
        if isinstance(value, list | tuple):
            return next(filter(None, map(self.problem, value)), None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if value in self:
            return None
        if self.high in (MAX_SIZE, MAX_COUNT) and value > self.high:
            return f"{_short(value)} must be at most {_shown(self.high)}"
        return f"{_short(value)} must be {self}"


FINITE = Range()
COUNT = Range(0, MAX_COUNT, shown=False)
POSITIVE = Range(1, MAX_COUNT, shown=False)
SIZE = Range(1, MAX_SIZE, shown=False)
LAYERS = Range(1, 100_000)
RANKS = Range(1, MAX_RANKS)
SEED = Range(0, 2**32 - 1)
PROBABILITY = Range(0, 1, below=True)
FRACTION = Range(0, 1)
NOT_NEGATIVE = Range(0)
ABOVE_ZERO = Range(0, above=True)


@dataclass(frozen=True)
class Number:
    """A type for ``add_argument``: converts the text, then checks the range.

    Attributes:
        convert: from text to a number or a list of numbers.
        range: allowed values.
        name: the expected type, for messages.
    """

    convert: Callable[[str], Any]
    range: Range
    name: str

    def __call__(self, text: str) -> Any:
        try:
            value = self.convert(text)
        except (ValueError, OverflowError) as error:
            message = f"{_short(text)!r} is not {self.name}"
            raise argparse.ArgumentTypeError(message) from error
        if problem := self.range.problem(value):
            raise argparse.ArgumentTypeError(problem)
        return value


def whole(low: int, high: int = MAX_COUNT) -> Number:
    """A whole number from ``low`` to ``high``."""
    return Number(whole_number, Range(low, high, shown=high < MAX_SIZE), "a whole number")


def number(range: Range = FINITE) -> Number:
    """A number of ``range``."""
    return Number(float, range, "a number")


def whole_number(text: str) -> int:
    """``1000``, ``1_000`` or ``1e6``.

    Raises:
        ValueError: it is no whole number.
    """
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not value.is_integer() or abs(value) > 2**53:  # a float says no more than this
            raise
        return int(value)


def range_of(action: argparse.Action) -> Range | None:
    """The declared range of a flag, or None where it takes no number."""
    return action.type.range if isinstance(action.type, Number) else None


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help texts with each flag's default, unless they tell it, and the range of numbers."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if (
            default in (None, "", [], {}, argparse.SUPPRESS)
            or default is False
            or "default" in text
        ):
            return text
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
        value = f"{shown:g}" if isinstance(shown, float) else str(shown)
        return f"{text} (default: {value.replace('%', '%%')})" if action.option_strings else text

    def _expand_help(self, action: argparse.Action) -> str:
        text, range = super()._expand_help(action), range_of(action)
        if range is None or str(range) in text:
            return text
        return f"{text} ({range})" if text else f"({range})"


class Parser(argparse.ArgumentParser):
    """An argument parser that raises :class:`ConfigError` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """``argument --lr: nan must be ...`` of argparse as ``--lr nan must be ...``."""
        raise ConfigError(re.sub(r"^argument (-[\w-]+)[\w/-]*: ", r"\1 ", message))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all words, as argparse does; an error about an unknown flag names the closest."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise ConfigError(unknown_flags(unknown, self._option_string_actions))
        return found

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.nargs is None and arg_strings == ["--"]:  # argparse takes it for no value at all
            raise argparse.ArgumentError(action, "'--' is no value")
        return super()._get_values(action, arg_strings)


def unknown_flags(unknown: Sequence[str], known: Iterable[str]) -> str:
    """The message for words that no flag takes, with the ``known`` flags that were meant."""
    spellings = [name for name in known if name.startswith("--")]
    lines = []
    for token in unknown:
        name = token.split("=")[0]
        if name.startswith("-") and not _is_number(name):
            near = closest_flags(name, spellings)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            lines.append(f"unknown flag {name}{hint}")
    return "\n".join(lines) or f"unexpected argument {unknown[0]!r}: no flag takes it"


def closest_flags(name: str, known: Sequence[str]) -> list[str]:
    """Up to three flags that ``name`` could mean; those with the longest equal beginning first."""

    def equal_beginning(other: str) -> int:
        pairs = zip(name, other, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    near = difflib.get_close_matches(name, known, n=10, cutoff=0.5)
    return sorted(near, key=equal_beginning, reverse=True)[:3]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _shown(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else f"{value:g}"


def _short(value: Any) -> str:
    """A value as a message repeats it; Python itself refuses to print very long numbers."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
