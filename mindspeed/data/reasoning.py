"""Reasoning of answers: where a record has it, and how a model writes it after its prompt.

A record has it in a field (``reasoning_content``) or inline, as ``<think>...</think>`` at the start
of the content. Some chat templates open the block in the prompt that they generate from, and render
answers without it (DeepSeek-R1's). What their model writes is then not in the template's text of
the whole conversation; :func:`as_generated` puts it together from the prompt and that text.
"""

from __future__ import annotations

import re
from typing import Any

from mindspeed.data.chat_template import Message

_INLINE = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_PROMPT_MARKS = re.compile(r"<think>\s*\Z|(?:<think>\s*)?</think>\s*\Z")
_EMPTY_BLOCK = re.compile(r"\s*(?:<think>\s*)?</think>\s*")


def with_field(message: Message) -> dict[str, Any]:
    """An answer with the reasoning at the start of its content as ``reasoning_content``."""
    found = dict(message)
    inline = _INLINE.match(str(message.get("content", "")))
    if message.get("role") == "assistant" and inline and not message.get("reasoning_content"):
        found["content"] = message["content"][inline.end() :]
        if reasoning := inline[1].strip():
            found["reasoning_content"] = reasoning
    return found


def has_reasoning(message: Message) -> bool:
    """Whether an answer has reasoning, in its field or inline."""
    return bool(with_field(message).get("reasoning_content"))


def has_marks(prompt: str) -> bool:
    """Whether a prompt ends with a block of reasoning, opened or closed."""
    return bool(_PROMPT_MARKS.search(prompt))


def contains(text: str, part: str) -> bool:
    """Whether ``part`` is in a text, apart from blanks."""
    return "".join(part.split()) in "".join(text.split())


def as_generated(prompt: str, whole: str, reasoning: str) -> str | None:
    """The prompt and what a model writes after it.

    Args:
        prompt: from which the answer is generated.
        whole: the template's text of the conversation with the answer.
        reasoning: of the answer.

    Returns:
        The text; None where the two texts differ in more than the block of reasoning, or where the
        prompt has closed the block of an answer with reasoning.
    """
    marks = _PROMPT_MARKS.search(prompt)
    before = prompt[: marks.start()] if marks else prompt
    if not whole.startswith(before):
        return None
    answer = whole[len(before) :]
    if marks and (empty := _EMPTY_BLOCK.match(answer)):
        answer = answer[empty.end() :]
    if marks and "</think>" in marks[0]:
        return None if reasoning else prompt + answer
    begin = "" if marks else "<think>\n"
    opened = marks[0] if marks else begin
    end = "\n</think>\n\n" if opened.endswith("\n") else "</think>"
    return prompt + begin + reasoning.strip() + end + answer.lstrip("\n")
