"""Calls of tools, read while they are written: arguments as a JSON object, or between tags.

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

from mindspeed.inference.answers.call_formats import JsonFormat, TaggedFormat
from mindspeed.inference.answers.parts import AnswerPart, CallReader
from mindspeed.inference.text_stream import partial_stop_length
from mindspeed.parsing import decode_json

_WITH_NAME = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class JsonCalls(CallReader):
    """The calls of one answer."""

    def __init__(self, form: JsonFormat) -> None:
        super().__init__(form)
        self._json, self._call = form, _Call()

    def read(self, last: bool) -> Iterator[AnswerPart]:
        """Read one call after the other; each is text from the end of the one before on."""
        before = None
        while self.open and before != self.text:
            before = self.text
            yield from self._one(self._call, last)

    def _one(self, call: _Call, last: bool) -> Iterator[AnswerPart]:
        if call.at < 0:
            call.at = self.text.find("{")
            if call.at < 0:
                if last and self.calls and re.fullmatch(self._json.end, self.text):
                    self.end("")
                elif last:
                    yield self.reject()
                return
            pattern = self._json.between if self.calls else self._json.begin
            head = re.fullmatch(pattern, self.text[: call.at])
            if head is None:
                yield self.reject()
                return
            call.name = head.groupdict().get("name") or ""
            call.inside = not call.name
            call.whole = _Braces(call.at)
            if call.name:
                yield self._begin(call, call.at)
        yield from self._object(call, last)

    def _object(self, call: _Call, last: bool) -> Iterator[AnswerPart]:
        end = call.whole.end(self.text)
        if call.arguments is None and call.inside:
            named = _WITH_NAME.match(self.text, call.at)
            if named:
                call.name = decode_json(named[1])
                yield self._begin(call, named.end())
        if call.arguments is not None:
            until = call.arguments.end(self.text) or len(self.text)
            if until > call.sent:
                yield self.arguments(self.text[call.sent : until])
                call.sent = until
        if end is None:
            if last:
                yield self.reject()
            return
        found = call.parse(self.text[call.at : end])
        if found is None:
            yield self.reject()
            return
        if call.arguments is None:
            call.name = found[0]
            yield self._begin(call, call.at)
            yield self.arguments(json.dumps(found[1], ensure_ascii=False))
        self.calls += 1
        self.text, self._call = self.text[end:], _Call()

    def _begin(self, call: _Call, arguments: int) -> AnswerPart:
        call.arguments, call.sent = _Braces(arguments), arguments
        return self.begin(call.name)


class _Call:
    """A call that is being read."""

    def __init__(self) -> None:
        self.at = -1  # of its object
        self.name = ""
        self.inside = False  # the object has the name too
        self.whole = _Braces(0)
        self.arguments: _Braces | None = None
        self.sent = 0

    def parse(self, text: str) -> tuple[str, Any] | None:
        """Name and arguments; None if it is no call."""
        try:
            value = decode_json(text)
        except ValueError:
            return None
        if not self.inside:
            return self.name, value
        name = value.get("name")
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            try:
                arguments = decode_json(arguments)
            except ValueError:
                return None
        return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


class _Braces:
    """Finds the end of the JSON object that begins at a place in a growing text."""

    def __init__(self, at: int) -> None:
        self._next, self._depth, self._string, self._found = at, 0, False, 0

    def end(self, text: str) -> int | None:
        """The place after its last brace; None while it is not in the text."""
        while not self._found and self._next < len(text):
            letter = text[self._next]
            if letter == "\\" and self._string:
                if self._next + 1 == len(text):
                    return None
                self._next += 1
            elif letter == '"':
                self._string = not self._string
            elif not self._string and letter in "{}":
                self._depth += 1 if letter == "{" else -1
                if not self._depth:
                    self._found = self._next + 1
            self._next += 1
        return self._found or None


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

    def read(self, last: bool) -> Iterator[AnswerPart]:
        before = None
        while self.open and before != (self._at, self._inside, len(self.text)):
            before = (self._at, self._inside, len(self.text))
            if not self._name:
                yield from self._head(last)
            elif self._inside:
                yield from self._value(last)
            else:
                yield from self._between(last)

    def _head(self, last: bool) -> Iterator[AnswerPart]:
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

    def _between(self, last: bool) -> Iterator[AnswerPart]:
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

    def _value(self, last: bool) -> Iterator[AnswerPart]:
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

    def _string(self, place: int, padded: bool) -> Iterator[AnswerPart]:
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
