"""JSON that others wrote, checked against declared fields.

    FIELDS = {"hidden_size": Whole(1, 2**24), "hidden_act": OneOf("silu", "swish")}
    values = read_object(path, ConfigError)
    check(values, FIELDS, str(path), ConfigError)

Whatever the file holds, the answer is a checked mapping or one line that names the file, the field,
the value and what is allowed. :func:`check` leaves fields alone that are not declared;
:func:`check_declared` refuses them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, get_type_hints

from mindspeed.errors import MindSpeedError
from mindspeed.parsing import read_json

_SHOWN = 60  # characters of a wrong value in a message


class Allowed(Protocol):
    """The values that a field may have; ``str()`` describes them."""

    def problem(self, value: Any) -> tuple[str, Any, str] | None:
        """The path below the field, the value there and what is allowed; None if it is right."""


@dataclass(frozen=True)
class Whole:
    """A whole number between ``low`` and ``high``."""

    low: int = 0
    high: int = 2**31 - 1

    def problem(self, value: Any) -> tuple[str, Any, str] | None:
        right = isinstance(value, int) and not isinstance(value, bool)
        return None if right and self.low <= value <= self.high else ("", value, str(self))

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {self.high}"


@dataclass(frozen=True)
class Real:
    """A finite number between ``low`` and ``high``."""

    low: float = -math.inf
    high: float = math.inf

    def problem(self, value: Any) -> tuple[str, Any, str] | None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        right = number and math.isfinite(_real(value)) and self.low <= value <= self.high
        return None if right else ("", value, str(self))

    def __str__(self) -> str:
        if self.high == math.inf:
            return "a finite number" + ("" if self.low == -math.inf else f" from {self.low:g}")
        return f"a number from {self.low:g} to {self.high:g}"


def _real(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond every float
        return math.inf


@dataclass(frozen=True)
class Kind:
    """A value of one type."""

    type: type
    name: str

    def problem(self, value: Any) -> tuple[str, Any, str] | None:
        return None if isinstance(value, self.type) else ("", value, str(self))

    def __str__(self) -> str:
        return self.name


class Anything:
    def problem(self, value: Any) -> tuple[str, Any, str] | None:
        return None

    def __str__(self) -> str:
        return "anything"


class OneOf:
    """One of some values; of the same type, so that 1 is not ``true``."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def problem(self, value: Any) -> tuple[str, Any, str] | None:
        return None if any(_same(value, other) for other in self.values) else ("", value, str(self))

    def __str__(self) -> str:
        return " or ".join(json.dumps(value) for value in self.values)


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


class Either:
    """What one of several descriptions allows."""

    def __init__(self, *options: Allowed) -> None:
        self.options = options

    def problem(self, value: Any) -> tuple[str, Any, str] | None:
        found = [option.problem(value) for option in self.options]
        if None in found:
            return None
        inside = next((problem for problem in found if problem is not None and problem[0]), None)
        return inside or ("", value, str(self))

    def __str__(self) -> str:
        return " or ".join(str(option) for option in self.options)


@dataclass(frozen=True)
class ListOf:
    """A list of values that ``item`` allows."""

    item: Allowed

    def problem(self, value: Any) -> tuple[str, Any, str] | None:
        if not isinstance(value, list | tuple):
            return ("", value, str(self))
        for index, entry in enumerate(value):
            if (found := self.item.problem(entry)) is not None:
                return (f"[{index}]{found[0]}", *found[1:])
        return None

    def __str__(self) -> str:
        return f"a list, each entry {self.item}"


@dataclass(frozen=True)
class MapOf:
    """An object with any keys, whose values ``item`` allows."""

    item: Allowed

    def problem(self, value: Any) -> tuple[str, Any, str] | None:
        if not isinstance(value, Mapping):
            return ("", value, str(self))
        for key, entry in value.items():
            if (found := self.item.problem(entry)) is not None:
                return (f".{_shown(key)}{found[0]}", *found[1:])
        return None

    def __str__(self) -> str:
        return f"an object, each value {self.item}"


@dataclass(frozen=True)
class Object:
    """An object with declared fields; others may be there."""

    fields: Mapping[str, Allowed]

    def problem(self, value: Any) -> tuple[str, Any, str] | None:
        if not isinstance(value, Mapping):
            return ("", value, str(self))
        for name, allowed in self.fields.items():
            if name in value and (found := allowed.problem(value[name])) is not None:
                return (f".{name}{found[0]}", *found[1:])
        return None

    def __str__(self) -> str:
        return "an object"


BOOL = Kind(bool, "true or false")
TEXT = Kind(str, "a text")
NULL = Kind(type(None), "null")
ANYTHING = Anything()


def or_null(allowed: Allowed) -> Allowed:
    """The same, or null."""
    return Either(allowed, NULL)


def check_declared(
    values: Any,
    kind: type,
    where: str,
    error: type[MindSpeedError],
    removed: Mapping[str, str] | None = None,
) -> None:
    """See that an object has exactly the fields of a dataclass, with right values.

    What a field may hold stands in its annotation: ``Annotated[float, Real(0)]``.

    Args:
        values: What the file holds.
        kind: The dataclass.
        where: Name of the object, for messages.
        error: Raised for the first field that is unknown, missing or wrong.
        removed: What to say of fields that files had, by name.
    """
    known = {entry.name: entry for entry in fields(kind)}
    if not isinstance(values, Mapping):
        raise error(f"{where} is no object with {', '.join(known)}")
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else (removed or {}).get(name, "")
            raise error(f"{where}: unknown field {name!r}{hint} (known: {', '.join(known)})")
    for name, entry in known.items():
        required = entry.default is MISSING and entry.default_factory is MISSING
        if required and name not in values:
            raise error(f"{where}: field {name} is missing")
    hints = get_type_hints(kind, include_extras=True)
    check(values, {name: hints[name].__metadata__[0] for name in known}, where, error)


def read_object(path: Path, error: type[MindSpeedError]) -> dict[str, Any]:
    """The JSON object that a file holds.

    Args:
        path: The file.
        error: Raised where it cannot be read, or holds something else.
    """
    value = read_json(path, str(path), error)
    if not isinstance(value, dict):
        raise error(f"{path} is no JSON object, but {_shown(value)}")
    return value


def check(
    values: Mapping[str, Any],
    fields: Mapping[str, Allowed],
    where: str,
    error: type[MindSpeedError],
) -> None:
    """See that declared fields hold what they may; those that are missing are not looked for.

    Args:
        values: What the file holds.
        fields: What is allowed.
        where: Name of the file, for messages.
        error: Raised for the first field that holds something else.
    """
    found = Object(fields).problem(values)
    if found is not None:
        path, value, allowed = found
        raise error(f"{where}: {path.removeprefix('.')} is {_shown(value)}; allowed is {allowed}")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
