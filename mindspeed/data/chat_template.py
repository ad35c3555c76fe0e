"""What a chat template is: a conversation in, its text and the assistant's characters out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed.errors import DataError

ROLES = ("system", "user", "assistant")

Message = Mapping[str, str]
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: all of it.
        spans: ``[start, end)`` characters of every answer and its stop token, in order.
        replaced: ``(start, end, text)``: the token at ``[start, end)`` is trained as the token
            ``text`` (formats that do not write an answer's end).
    """

    text: str
    spans: tuple[Span, ...]
    replaced: tuple[tuple[int, int, str], ...] = ()


class ChatTemplate(ABC):
    """How conversations become text.

    Attributes:
        name: as given to :func:`load`.
        stop: strings at which generation ends.
        special: what the tokenizer must know as single tokens.
        plain: the tokenizer's own special tokens (bos) are to be added.
    """

    name: str
    stop: tuple[str, ...]
    special: tuple[str, ...]
    plain: bool

    @abstractmethod
    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> Rendered:
        """Turn a conversation into text.

        Args:
            messages: ``{"role": "system" | "user" | "assistant", "content": text}`` each; a
                system message comes first, an empty one suppresses the default.
            add_generation_prompt: end with what makes the assistant speak.

        Raises:
            DataError: a role or content that the format has no place for.
        """


def checked(message: Any, index: int) -> tuple[str, str]:
    """Role and content of a message.

    Raises:
        DataError: names the message and what is wrong with it.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise DataError(
            f"message {index + 1}: role {role!r} is unknown; allowed are {', '.join(ROLES)}"
        )
    content = message.get("content")
    if not isinstance(content, str):
        raise DataError(
            f"message {index + 1} ({role}): content is {type(content).__name__}, a string is "
            "expected"
        )
    return role, content
