"""Answers of gpt-oss, which are messages on channels, read while they are written.

    <|channel|>analysis<|message|>The user wants ...<|end|>                      reasoning
    <|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>          content
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>

The last one is a call. Text on the channel commentary without a recipient is for the user, too.
Source: OpenAI, "Harmony response format".
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mindspeed.inference.answers.call_formats import ChannelFormat
from mindspeed.inference.answers.parts import AnswerPart, CallReader
from mindspeed.inference.text_stream import partial_stop_length
from mindspeed.parsing import decode_json

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


class ChannelReader(CallReader):
    """Reads a whole answer, whose first message has no beginning: it is in the prompt.

    Args:
        form: The format.
        offered: Tools were offered; else a message to a recipient is content.
    """

    def __init__(self, form: ChannelFormat, offered: bool) -> None:
        super().__init__(form)
        self._offered = offered
        self._kind = ""  # of the part of this message; empty: in its header
        self._body = ""
        self._said = set[str]()  # kinds of the parts before it

    def push(self, text: str) -> list[AnswerPart]:
        """The parts that new text completes."""
        return list(self.more(text, False))

    def finish(self) -> list[AnswerPart]:
        """The parts that were held back for more text."""
        return list(self.more("", True))

    def read(self, last: bool) -> Iterator[AnswerPart]:
        before = None
        while before != (self._kind, self.text):
            before = (self._kind, self.text)
            yield from self._message(last) if self._kind else self._header(last)

    def _header(self, last: bool) -> Iterator[AnswerPart]:
        head, found, rest = self.text.partition(_MESSAGE)
        if not found:
            if last and not head.lstrip().startswith("<|"):
                self.text = ""  # an answer without channels
                yield from [AnswerPart("content", head)] if head.strip() else []
            return
        channel = re.search(r"<\|channel\|>\s*(\w+)", head)
        to = re.search(r"\bto=([^\s<]+)", head)
        self.text, self._body = rest, ""
        if to and self._offered:
            self._kind = "arguments"
            yield self.begin(to[1].removeprefix("functions."))
        else:
            analysis = channel is not None and channel[1] == "analysis"
            self._kind = "reasoning" if analysis else "content"

    def _message(self, last: bool) -> Iterator[AnswerPart]:
        places = [place for end in _ENDS if (place := self.text.find(end)) >= 0]
        held = 0 if places or last else partial_stop_length(self.text, _ENDS)
        until = min(places, default=len(self.text) - held)
        piece, rest = self.text[:until], self.text[until:]
        if piece:
            yield from self._piece(piece)
        self._body += piece
        self.text = rest
        if places or last:
            if self._kind == "arguments":
                yield from self._end_of_call()
            self._said |= {self._kind} if self._body else set()
            self.text = re.sub(r"^<\|(end|call|return)\|>", "", rest)
            self._kind = ""

    def _piece(self, text: str) -> Iterator[AnswerPart]:
        if self._kind != "arguments" and not self._body and self._kind in self._said:
            yield AnswerPart(self._kind, "\n")
        yield AnswerPart(self._kind, text, self.calls)

    def _end_of_call(self) -> Iterator[AnswerPart]:
        try:
            valid = isinstance(decode_json(self._body), dict)
        except ValueError:
            valid = False
        if valid:
            self.calls += 1
        else:
            yield AnswerPart("rejected", self._body, self.calls)
