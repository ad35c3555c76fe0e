"""The answers of a conversation: which are trained, and where they are in its text.

    mark(0), mark(1)              # stand in place of the answers in a second rendering
    parts = around(frame, marks)  # the format: the text before, between and after them
    located(text, parts, ends, answers)

A template may strip answers or shorten them; then each ends at the next part of the format.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed.data.chat_template import BEGUN, CHANGED, NO_PROMPT, Message, Span


def answers_of(messages: Sequence[Message]) -> list[int]:
    """Indices of the answers."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def prompted(messages: Sequence[Message]) -> list[int]:
    """Indices of the answers behind the first question: the others have no prompt."""
    found = (i for i, message in enumerate(messages) if message["role"] in ("user", "tool"))
    first = next(found, len(messages))
    return [index for index in answers_of(messages) if index > first]


def trained_answers(messages: Sequence[Message]) -> list[int]:
    """Indices of the answers to train that have a prompt."""
    return [index for index in prompted(messages) if messages[index].get("weight") != 0]


def without_prompt(messages: Sequence[Message]) -> list[str]:
    """Remarks on answers to train that have none."""
    trained = [i for i in answers_of(messages) if messages[i].get("weight") != 0]
    return [NO_PROMPT] * (len(trained) - len(trained_answers(messages)))


def mark(index: int) -> str:
    """The text that stands in place of an answer."""
    return f"\N{OBJECT REPLACEMENT CHARACTER}answer-{index}\N{OBJECT REPLACEMENT CHARACTER}"


def around(frame: str, marks: Sequence[str]) -> list[str] | None:
    """The text around the marks; None unless every mark occurs exactly once and in order."""
    parts = []
    for one in marks:
        before, found, frame = frame.partition(one)
        if not found or one in frame:
            return None
        parts.append(before)
    return [*parts, frame]


def end_of_header(part: str, header: str) -> int:
    """End of the last ``header`` in the text before an answer; without one, the end of the text."""
    at = part.rfind(header) if header else -1
    return len(part) if at < 0 else at + len(header)


def remarks_on(rendered: str, answer: str) -> list[str]:
    """How the text of an answer differs from it, apart from blanks."""
    shown, expected = ("".join(text.split()) for text in (rendered, answer))
    if expected not in shown:
        return [CHANGED]
    return [] if shown.startswith(expected) else [BEGUN]


def located(
    text: str, parts: list[str] | None, ends: Sequence[int], answers: Sequence[str]
) -> list[Span] | None:
    """Span of each answer in ``text``, which must consist of ``parts`` and the answers.

    A span begins where its prompt ends, at ``ends`` in the part before it.
    """
    if parts is None:
        return None
    for strip in (str, str.strip):
        stripped = [strip(answer) for answer in answers]
        texts = [parts[0]]
        spans = []
        for index, (answer, part) in enumerate(zip(stripped, parts[1:], strict=True)):
            start = sum(map(len, texts))
            begin = start - len(parts[index]) + ends[index]
            spans.append((begin, start + len(answer)))
            texts += [answer, part]
        if "".join(texts) == text:
            return spans
    cut = [part[:end] for part, end in zip(parts, ends, strict=False)]
    return _align(text, [*cut, parts[-1]])


def _align(text: str, parts: list[str]) -> list[Span] | None:
    """Spans of answers that the template shortened: each ends at the next part of the format."""
    if not text.startswith(parts[0]) or not text.endswith(parts[-1]):
        return None
    spans, start = [], len(parts[0])
    for part in parts[1:-1]:
        end = text.find(part, start)
        if end < 0 or not part:
            return None
        spans.append((start, end))
        start = end + len(part)
    end = len(text) - len(parts[-1])
    return [*spans, (start, end)] if end >= start else None


def equal_characters(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
