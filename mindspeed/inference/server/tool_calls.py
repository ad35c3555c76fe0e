"""How models write calls of tools, and the parts of an answer: reasoning, text and calls.

    <think> why </think>  Let me look.  <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    reasoning             content       name, then pieces of the arguments

A :class:`CallFormat` is data. :class:`AnswerParser` reads any of them while the answer is written;
a response that is not streamed is what its parts add up to.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.inference.text_stream import partial_stop_length
from mindspeed.parsing import decode_json


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls. Between two calls, and around them, stands no other text.

    The arguments are a JSON object, either after the name (group ``name`` of the expressions) or
    within one that has both: ``{"name": ..., "arguments" or "parameters": {...}}``.

    Attributes:
        name: As ``--tool-call-parser`` names it.
        opens: Text that begins the calls of an answer.
        begin: Expression of the text from there up to the first ``{``.
        between: Expression of the text between two objects.
        end: Expression of the text after the last one.
        start: Text that begins calls as well, but only as the first of an answer.
        shown: Special tokens that are a part of the format.
        template: Texts that occur in the chat template of such a model.
        others: Texts that do not.
        short_ids: Ids of calls have nine letters and digits, as the template requires.
    """

    name: str
    opens: str
    begin: str
    between: str
    end: str
    start: str = ""
    shown: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    short_ids: bool = False


_MISTRAL = r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(\[CALL_ID\]\w+)?(\[ARGS\])?\s*"
_DEEPSEEK = tuple(  # with a fullwidth bar and a lower block
    f"<\uff5c{name}\uff5c>".replace("_", "\u2581")
    for name in (
        "tool_calls_begin",
        "tool_call_begin",
        "tool_sep",
        "tool_call_end",
        "tool_calls_end",
    )
)
_CALLS, _CALL, _SEPARATOR, _CALL_END, _CALLS_END = _DEEPSEEK
_V3 = rf"\s*{_CALL}function{_SEPARATOR}(?P<name>[^\s<]+)\s*```json\s*"
_V31 = rf"\s*{_CALL}(?P<name>[^\s<]+)\s*{_SEPARATOR}\s*"

FORMATS = (
    CallFormat(
        name="hermes",
        opens="<tool_call>",
        begin=r"<tool_call>\s*",
        between=r"\s*</tool_call>\s*<tool_call>\s*",
        end=r"\s*(</tool_call>\s*)?",
        shown=("<tool_call>", "</tool_call>"),
        template=("<tool_call>",),
        others=("<function=", "<arg_key>"),
    ),
    CallFormat(
        name="llama3_json",
        opens="<|python_tag|>",
        begin=r"(<\|python_tag\|>)?\s*",
        between=r"\s*;\s*",
        end=r"\s*;?\s*",
        start="{",
        shown=("<|python_tag|>",),
        template=('"parameters": ', "<|start_header_id|>"),
    ),
    CallFormat(
        name="mistral",
        opens="[TOOL_CALLS]",
        begin=rf"\[TOOL_CALLS\]\s*\[\s*|{_MISTRAL}",
        between=rf"\s*,\s*|\s*{_MISTRAL}",
        end=r"\s*\]?\s*",
        shown=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        template=("[TOOL_CALLS]",),
        short_ids=True,
    ),
    CallFormat(
        name="deepseek_v3",
        opens=_CALLS,
        begin=_CALLS + _V3,
        between=rf"\s*```\s*{_CALL_END}{_V3}",
        end=rf"\s*(```\s*)?({_CALL_END}\s*)?({_CALLS_END})?\s*",
        shown=_DEEPSEEK,
        template=(_SEPARATOR, "```json"),
    ),
    CallFormat(
        name="deepseek_v31",
        opens=_CALLS,
        begin=_CALLS + _V31,
        between=rf"\s*{_CALL_END}{_V31}",
        end=rf"\s*({_CALL_END}\s*)?({_CALLS_END})?\s*",
        shown=_DEEPSEEK,
        template=(_SEPARATOR,),
        others=("```json",),
    ),
)
# What an answer must be where a request demands a call: a list of objects, by a grammar.
JSON_LIST = CallFormat("json", "[", r"\s*\[\s*", r"\s*,\s*", r"\s*\]\s*", start="[")

REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def format_of(source: str, name: str = "auto") -> CallFormat | None:
    """The format ``name``, by default the one of a chat template's program; None: no known one.

    Raises:
        ConfigError: There is no format of this name.
    """
    if name != "auto":
        found = next((one for one in FORMATS if one.name == name), None)
        if found is None:
            names = ", ".join(one.name for one in FORMATS)
            raise ConfigError(f"--tool-call-parser {name}: auto, {names} are known")
        return found
    for one in FORMATS:
        if all(text in source for text in one.template) and not any(
            text in source for text in one.others
        ):
            return one
    return None


def reasoning_of(source: str) -> tuple[str, str] | None:
    """What begins and ends the reasoning of answers in a chat template's program."""
    return next((marks for marks in REASONING if marks[1] in source), None)


@dataclass(frozen=True)
class Part:
    """A piece of an answer.

    Attributes:
        kind: ``reasoning``, ``content``, ``name`` (a call begins), ``arguments`` (a piece of them)
            or ``rejected``: what began as a call is none, ``text`` is all of it.
        text: The piece.
        call: Number of the call.
        id: Id of a call that begins.
    """

    kind: str
    text: str
    call: int = 0
    id: str = ""


_WITH_NAME = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class AnswerParser:
    """Splits an answer into its parts while it is written.

    Args:
        format: How the model writes calls; None: there are none.
        reasoning: What begins and ends its reasoning.
        thinking: The prompt has begun the reasoning.
    """

    def __init__(
        self,
        format: CallFormat | None = None,
        reasoning: tuple[str, str] | None = None,
        thinking: bool = False,
    ) -> None:
        self._format, self._reasoning = format, reasoning
        self._read = self._start if reasoning and not thinking else self._content
        if thinking:
            self._read = self._thoughts
        self._text = ""  # not yet a part
        self._said = False  # something other than blanks
        self._blanks = ""  # at the end of what has been said
        self._call = _Call()
        self.calls = 0

    def push(self, text: str) -> list[Part]:
        """The parts that new text completes."""
        self._text += text
        return list(self._parts(False))

    def finish(self) -> list[Part]:
        """The parts that were held back for more text."""
        return list(self._parts(True))

    def _parts(self, last: bool) -> Iterator[Part]:
        before = None
        while before != (self._read, self._text):
            before = (self._read, self._text)
            yield from self._read(last)

    def _start(self, last: bool) -> Iterator[Part]:
        """The answer may begin with its reasoning."""
        begin = self._reasoning[0]  # type: ignore[index]
        text = self._text.lstrip()
        if text.startswith(begin):
            self._text, self._read = text[len(begin) :], self._thoughts
        elif last or not begin.startswith(text):
            self._read = self._content
        yield from ()

    def _thoughts(self, last: bool) -> Iterator[Part]:
        """Reasoning, without the line breaks around it."""
        end = self._reasoning[1]  # type: ignore[index]
        text, found, rest = self._text.partition(end)
        keep = 0 if found or last else partial_stop_length(text, [end])
        text, self._text = text[: len(text) - keep], rest if found else text[len(text) - keep :]
        text = self._blanks + (text if self._said else text.lstrip("\n"))
        shown = text.rstrip("\n")
        self._blanks = text[len(shown) :]
        if shown:
            self._said = True
            yield Part("reasoning", shown)
        if found:
            self._said, self._blanks, self._read = False, "", self._after_thoughts

    def _after_thoughts(self, last: bool) -> Iterator[Part]:
        self._text = self._text.lstrip("\n")
        if self._text:
            self._read = self._content
        yield from ()

    def _content(self, last: bool) -> Iterator[Part]:
        form = self._format
        if form is None:
            yield from self._plain(last)
            return
        if form.start and not self._said:
            text = self._text.lstrip()
            if not text and not last:
                return
            if text.startswith(form.start):
                self._text, self._read = text, self._calls
                return
        text, found, _ = self._text.partition(form.opens)
        keep = 0 if found or last else partial_stop_length(text, [form.opens])
        text, self._text = text[: len(text) - keep], self._text[len(text) - keep :]
        text = self._blanks + text
        shown = text if last and not found else text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            self._said = True
            yield Part("content", shown)
        if found:
            self._read = self._calls

    def _plain(self, last: bool) -> Iterator[Part]:
        """Text as it is."""
        text, self._text = self._text, ""
        if text:
            yield Part("content", text)

    def _calls(self, last: bool) -> Iterator[Part]:
        """Text from the beginning of a call, or the end of the one before, on."""
        form, call = self._format, self._call
        assert form is not None
        if call.at < 0:
            call.at = self._text.find("{")
            if call.at < 0:
                if last and self.calls and re.fullmatch(form.end, self._text):
                    self._text, self._read = "", self._plain
                elif last:
                    yield from self._reject()
                return
            pattern = form.between if self.calls else form.begin
            head = re.fullmatch(pattern, self._text[: call.at])
            if head is None:
                yield from self._reject()
                return
            call.name = head.groupdict().get("name") or ""
            call.inside = not call.name
            call.whole = _Braces(call.at)
            if call.name:
                yield self._begin(call, call.at)
        yield from self._object(call, last)

    def _object(self, call: _Call, last: bool) -> Iterator[Part]:
        end = call.whole.end(self._text)
        if call.arguments is None and call.inside:
            named = _WITH_NAME.match(self._text, call.at)
            if named:
                call.name = decode_json(named[1])
                yield self._begin(call, named.end())
        if call.arguments is not None:
            until = call.arguments.end(self._text) or len(self._text)
            if until > call.sent:
                yield Part("arguments", self._text[call.sent : until], self.calls)
                call.sent = until
        if end is None:
            if last:
                yield from self._reject()
            return
        found = call.parse(self._text[call.at : end])
        if found is None:
            yield from self._reject()
            return
        if call.arguments is None:
            call.name = found[0]
            yield self._begin(call, call.at)
            yield Part("arguments", json.dumps(found[1], ensure_ascii=False), self.calls)
        self.calls += 1
        self._text, self._call = self._text[end:], _Call()

    def _begin(self, call: _Call, arguments: int) -> Part:
        call.arguments, call.sent = _Braces(arguments), arguments
        short = self._format is not None and self._format.short_ids
        name = uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}"
        return Part("name", call.name, self.calls, name)

    def _reject(self) -> Iterator[Part]:
        text, self._text, self._read = self._text, "", self._plain
        yield Part("rejected", text, self.calls)


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
    """Where the JSON object that begins at a place in a growing text ends."""

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
