"""The parts of an answer, their message, and what all readers of calls have in common."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed.inference.answers.call_formats import CallFormat


@dataclass(frozen=True)
class AnswerPart:
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


def message_of(parts: Sequence[AnswerPart]) -> dict[str, Any]:
    """The message of a whole answer. A call that was cut off, or is not valid, is content."""
    content = reasoning = ""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.kind == "name":
            calls[part.call] = call_of(part)
        elif part.kind == "arguments":
            calls[part.call]["function"]["arguments"] += part.text
        elif part.kind == "reasoning":
            reasoning += part.text
        else:
            calls.pop(part.call if part.kind == "rejected" else -1, None)
            content += part.text
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        found["reasoning_content"] = reasoning
    if calls:
        found["tool_calls"] = list(calls.values())
    if not content and (reasoning or calls):
        found["content"] = None
    return found


def call_of(part: AnswerPart) -> dict[str, Any]:
    """A call that begins."""
    return {"id": part.id, "type": "function", "function": {"name": part.text, "arguments": ""}}


class CallReader(ABC):
    """Reads the calls of an answer while they are written.

    Attributes:
        text: Given and not yet a part of a complete call.
        calls: Number of complete calls.
        open: More text may belong to calls; at the end :attr:`text` is what does not.
    """

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self.text, self.calls, self.open = "", 0, True

    def more(self, text: str, last: bool) -> Iterator[AnswerPart]:
        """The parts that new text completes; ``last``: it is the end of the answer."""
        self.text += text
        yield from self.read(last)

    @abstractmethod
    def read(self, last: bool) -> Iterator[AnswerPart]:
        """The parts that are complete in :attr:`text`."""

    def begin(self, name: str) -> AnswerPart:
        """A call begins."""
        short = self._form.short_ids
        id = uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}"
        return AnswerPart("name", name, self.calls, id)

    def arguments(self, text: str) -> AnswerPart:
        """A piece of the arguments of the call."""
        return AnswerPart("arguments", text, self.calls)

    def end(self, rest: str) -> None:
        """All calls have been read."""
        self.text, self.open = rest, False

    def reject(self) -> AnswerPart:
        """What has been read since the last complete call is none."""
        text = self.text
        self.end("")
        return AnswerPart("rejected", text, self.calls)
