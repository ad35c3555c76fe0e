"""Calls whose arguments are JSON objects, read while they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mindspeed.inference.answers.call_formats import JsonFormat
from mindspeed.inference.answers.parts import CallReader, Part
from mindspeed.parsing import decode_json

_WITH_NAME = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class JsonCalls(CallReader):
    """The calls of one answer."""

    def __init__(self, form: JsonFormat) -> None:
        super().__init__(form)
        self._json, self._call = form, _Call()

    def read(self, last: bool) -> Iterator[Part]:
        """Read one call after the other; each is text from the end of the one before on."""
        before = None
        while self.open and before != self.text:
            before = self.text
            yield from self._one(self._call, last)

    def _one(self, call: _Call, last: bool) -> Iterator[Part]:
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

    def _object(self, call: _Call, last: bool) -> Iterator[Part]:
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

    def _begin(self, call: _Call, arguments: int) -> Part:
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
