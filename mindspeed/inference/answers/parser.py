"""Splits an answer into reasoning, text and calls while it is written.

    <think> why </think>  Let me look.  <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    reasoning             content       name, then pieces of the arguments

A response that is not streamed is what these parts add up to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed.inference.answers.call_formats import (
    CallFormat,
    JsonFormat,
    TaggedFormat,
)
from mindspeed.inference.answers.call_readers import JsonCalls, TaggedCalls
from mindspeed.inference.answers.parts import AnswerPart, CallReader
from mindspeed.inference.text_stream import partial_stop_length


class AnswerParser:
    """Splits an answer into its parts while it is written.

    Args:
        format: How the model writes calls; None: there are none.
        reasoning: What begins and ends its reasoning.
        thinking: The prompt has begun the reasoning.
        tools: Definitions of the tools.
    """

    def __init__(
        self,
        format: CallFormat | None = None,
        reasoning: tuple[str, str] | None = None,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._format, self._reasoning = format, reasoning
        self._read = self._start if reasoning and not thinking else self._content
        if thinking:
            self._read = self._thoughts
        self._text = ""  # not yet a part
        self._said = False  # something other than blanks
        self._blanks = ""  # at the end of what has been said
        self._reader = None if format is None else _reader(format, tools)

    @property
    def calls(self) -> int:
        """Number of complete calls."""
        return 0 if self._reader is None else self._reader.calls

    def push(self, text: str) -> list[AnswerPart]:
        """The parts that new text completes."""
        self._text += text
        return list(self._parts(False))

    def finish(self) -> list[AnswerPart]:
        """The parts that were held back for more text."""
        return list(self._parts(True))

    def _parts(self, last: bool) -> Iterator[AnswerPart]:
        before = None
        while before != (self._read, self._text):
            before = (self._read, self._text)
            yield from self._read(last)

    def _start(self, last: bool) -> Iterator[AnswerPart]:
        """The answer may begin with its reasoning."""
        begin = self._reasoning[0]  # type: ignore[index]
        text = self._text.lstrip()
        if text.startswith(begin):
            self._text, self._read = text[len(begin) :], self._thoughts
        elif last or not begin.startswith(text):
            self._read = self._content
        yield from ()

    def _thoughts(self, last: bool) -> Iterator[AnswerPart]:
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
            yield AnswerPart("reasoning", shown)
        if found:
            self._said, self._blanks, self._read = False, "", self._after_thoughts

    def _after_thoughts(self, last: bool) -> Iterator[AnswerPart]:
        self._text = self._text.lstrip("\n")
        if self._text:
            self._read = self._content
        yield from ()

    def _content(self, last: bool) -> Iterator[AnswerPart]:
        form = self._format
        if form is None:
            yield from self._plain(last)
            return
        start = form.start if isinstance(form, JsonFormat) else ""
        if start and not self._said:
            text = self._text.lstrip()
            if not text and not last:
                return
            if text.startswith(start):
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
            yield AnswerPart("content", shown)
        if found:
            self._read = self._calls

    def _plain(self, last: bool) -> Iterator[AnswerPart]:
        """Text as it is."""
        text, self._text = self._text, ""
        if text:
            yield AnswerPart("content", text)

    def _calls(self, last: bool) -> Iterator[AnswerPart]:
        """Text from the beginning of a call, or the end of the one before, on."""
        assert self._reader is not None
        text, self._text = self._text, ""
        yield from self._reader.more(text, last)
        if not self._reader.open:
            self._text, self._read = self._reader.text, self._plain


def _reader(form: CallFormat, tools: Sequence[Mapping[str, Any]]) -> CallReader:
    if isinstance(form, TaggedFormat):
        return TaggedCalls(form, tools)
    assert isinstance(form, JsonFormat)
    return JsonCalls(form)
