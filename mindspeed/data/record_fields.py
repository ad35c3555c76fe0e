"""A record as a handler reads it, and what becomes of the columns that it does not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

_TOOLS = "this format has no tools: the model would be trained without a part of the conversation"
_PAIR = (
    "a preference pair is not one answer: train pairs with mindspeed dpo, or name the column to "
    "train with --map-keys"
)
REFUSED: dict[str, str] = {
    "tools": _TOOLS,
    "functions": _TOOLS,
    "tool_calls": _TOOLS,
    "function_call": _TOOLS,
    "chosen": _PAIR,
    "rejected": _PAIR,
}
# Columnar files fill the fields that a record lacks with null.
EMPTY: tuple[Any, ...] = (None, "", [], {}, "[]", "{}")


class RecordFields:
    """A record whose columns are accessed through ``--map-keys``.

    Args:
        record: columns and values.
        keys: role of a column in the handler -> name of the column.

    Attributes:
        remarks: what of the record is not used -> how often.
        tools: definitions of tools, in OpenAI's form.
    """

    def __init__(self, record: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        self._record = record
        self._keys = keys
        self._read: set[str] = set()
        self.remarks: Counter[str] = Counter()
        self.tools: list[dict[str, Any]] = []

    def _get(self, key: str) -> Any:
        self._read.add(self._keys[key])
        return self._record.get(self._keys[key])

    def check_rest(self) -> None:
        """Count the columns that were not read in :attr:`remarks`.

        Raises:
            ValueError: one of them changes what the record means for training.
        """
        unread = unused_columns(self._record, self._read)
        for column in unread:
            pair = column == "rejected" and "chosen" in self._read
            if column in REFUSED and not pair:
                raise ValueError(f"the column {column!r} is not read: {REFUSED[column]}")
        if self._record.get("label") is False and "label" in unread:
            raise ValueError("'label' is false: an undesired answer is not trained")
        self.remarks.update(map(unused_column, unread))

    def has(self, key: str) -> bool:
        """Whether the record has a column, with a value."""
        return self._record.get(self._keys[key]) not in EMPTY

    def value(self, key: str) -> Any:
        """The value of a required column."""
        column = self._keys[key]
        if column not in self._record:
            has = ", ".join(map(repr, self._record)) or "nothing"
            raise ValueError(f"no column {column!r} ({key}); the record has {has}")
        return self._get(key)

    def text(self, key: str) -> str:
        """The text of a required column."""
        return text_of(self.value(key), self._keys[key])

    def number(self, key: str) -> float:
        """The number of a required column."""
        value, column = self.value(key), self._keys[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{column!r} is {type(value).__name__}, a number is expected")
        return float(value)

    def either(self, key: str, other: str) -> Any:
        """The value of an optional column, or of one with another name."""
        value = self._get(key)
        if value not in EMPTY or other not in self._record:
            return value
        self._read.add(other)
        return self._record[other]

    def optional(self, key: str) -> str:
        """The text of an optional column; empty if it is missing or null."""
        value = self._get(key)
        return "" if value is None else text_of(value, self._keys[key])

    def items(self, key: str, required: bool = True) -> list[Any]:
        value = self.value(key) if required else self._get(key)
        if value is None and not required:
            return []
        if not isinstance(value, list):
            column = self._keys[key]
            raise ValueError(f"{column!r} is {type(value).__name__}, a list is expected")
        return value

    def tag(self, key: str) -> str:
        """A key or role name that ``--map-keys`` sets, used inside a list of messages."""
        return self._keys[key]


def unused_columns(record: Mapping[str, Any], used: Collection[str]) -> list[str]:
    """The columns with a value that are not among ``used``."""
    return [name for name, value in record.items() if name not in used and value not in EMPTY]


def unused_column(name: str) -> str:
    """How a column that nothing reads is reported, after the number of records."""
    return f"records have a column {name!r} that is not used"


def text_of(value: Any, column: str) -> str:
    """A value that has to be a text."""
    if not isinstance(value, str):
        raise ValueError(f"{column!r} is {type(value).__name__}, a string is expected")
    return value
