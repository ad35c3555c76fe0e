"""Calls whose arguments stand between tags, read while they are written.

<tool_call>                    name
<function=f>
<parameter=place>
Paris                          {"place": "Paris"    in pieces, while it is written
</parameter>
<parameter=days>
3                              , "days": 3          where the tool's schema does not say string
</parameter>
</function>                    }
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed.inference.answers.call_formats import TaggedFormat
from mindspeed.inference.answers.parts import CallReader, Part
from mindspeed.inference.text_stream import partial_stop_length
from mindspeed.parsing import decode_json

_PYTHON = {"True": True, "False": False, "None": None}  # as Jinja writes them
_TYPES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (bool, ("boolean",)),
    (int, ("integer", "number")),
    (float, ("number",)),
    (str, ("string",)),
    (list, ("array",)),
    (dict, ("object",)),
    (type(None), ("null",)),
)


class TaggedCalls(CallReader):
    """The calls of one answer.

    Args:
        form: Its tags.
        tools: Definitions of the tools, which say what the values are.
    """

    def __init__(self, form: TaggedFormat, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(form)
        self._tags, self._tools = form, tools
        self._begin_call()

    def _begin_call(self) -> None:
        self._at = 0  # everything before it has been read
        self._name = self._key = ""
        self._arguments = 0
        self._streaming: bool | None = None  # inside of a string that is sent in pieces
        self._inside = False  # of a value

    def read(self, last: bool) -> Iterator[Part]:
        before = None
        while self.open and before != (self._at, self._inside, len(self.text)):
            before = (self._at, self._inside, len(self.text))
            if not self._name:
                yield from self._head(last)
            elif self._inside:
                yield from self._value(last)
            else:
                yield from self._between(last)

    def _head(self, last: bool) -> Iterator[Part]:
        if self.calls and not self.text.lstrip().startswith(self._tags.opens):
            rest = self.text.lstrip()
            if last or not self._tags.opens.startswith(rest):
                self.end(self.text if rest else "")
            return
        head = re.match(r"\s*" + self._tags.head, self.text)
        if head:
            self._name, self._at = head["name"].strip(), head.end()
            yield self.begin(self._name)
        elif last or "</tool_call>" in self.text:
            yield self.reject()

    def _between(self, last: bool) -> Iterator[Part]:
        """An argument, or the end of the call."""
        argument = re.compile(self._tags.argument).match(self.text, self._at)
        # A line break may follow, which the next text brings.
        if argument and (last or argument.end() < len(self.text)):
            self._key, self._at, self._inside = argument["key"].strip(), argument.end(), True
            yield self.arguments(f"{', ' if self._arguments else '{'}{_json(self._key)}: ")
            self._arguments += 1
            return
        end = re.compile(self._tags.end).match(self.text, self._at)
        if end is None and last:
            end = re.compile(self._tags.cut_end).fullmatch(self.text, self._at)
        if end is not None:
            yield self.arguments("}" if self._arguments else "{}")
            self.calls += 1
            self.text = self.text[end.end() :]
            self._begin_call()
        elif last or not "<".startswith(self.text[self._at :].lstrip()[:1]):
            yield self.reject()

    def _value(self, last: bool) -> Iterator[Part]:
        allowed = _types_of(self._tools, self._name, self._key)
        place = self.text.find(self._tags.value_end, self._at)
        padded = self._tags.argument.endswith("\\n?")
        if allowed == {"string"}:
            yield from self._string(place, padded)
        if place < 0:
            if last:
                yield self.reject()
            return
        if self._streaming is None:
            value = self.text[self._at : place]
            value = value.removesuffix("\n") if padded else value
            yield self.arguments(_json(_value_of(value, allowed)))
        self._at, self._inside, self._streaming = place + len(self._tags.value_end), False, None

    def _string(self, place: int, padded: bool) -> Iterator[Part]:
        """A piece of a string, and quotes around it."""
        ends = [("\n" if padded else "") + self._tags.value_end, self._tags.value_end]
        text = self.text[self._at :]
        if place >= 0:
            piece = text[: place - self._at]
            piece = piece.removesuffix("\n") if padded else piece
        else:
            piece = text[: len(text) - partial_stop_length(text, ends)]
        begin = "" if self._streaming else '"'
        self._streaming = True
        found = begin + _json(piece)[1:-1] + ('"' if place >= 0 else "")
        self._at += len(piece)
        if found:
            yield self.arguments(found)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _value_of(text: str, allowed: set[str] | None) -> Any:
    """A value: JSON, or what Jinja makes of it, where the schema allows it; else the text."""
    try:
        value = decode_json(text)
    except ValueError:
        if text not in _PYTHON:
            return text
        value = _PYTHON[text]
    if allowed is None:
        return value
    names = next(names for kind, names in _TYPES if type(value) is kind)
    return text if "string" in allowed and allowed.isdisjoint(names) else value


def _types_of(tools: Sequence[Mapping[str, Any]], name: str, key: str) -> set[str] | None:
    """The types that a tool's schema allows for an argument; None: all."""
    schemas = [t["function"].get("parameters") for t in tools if t["function"]["name"] == name]
    properties = (schemas[0] or {}).get("properties") if schemas else None
    return _types(properties.get(key)) if isinstance(properties, dict) else None


def _types(schema: Any) -> set[str] | None:
    if not isinstance(schema, dict):
        return None
    given = schema.get("type")
    if given is not None:
        return {given} if isinstance(given, str) else set(given)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {name for value in values for kind, names in _TYPES if type(value) is kind
                for name in names}  # fmt: skip
    parts = schema.get("anyOf") or schema.get("oneOf")
    found = [_types(part) for part in parts] if isinstance(parts, list) else [None]
    return None if None in found else set[str]().union(*(one for one in found if one))
