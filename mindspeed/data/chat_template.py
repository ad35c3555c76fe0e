"""The interface of chat templates: conversation -> text and character spans of the assistant.

The answers of a conversation, which of them are trained and where they are in its text:

    mark(0), mark(1)              # stand in place of the answers in a second rendering
    parts = around(frame, marks)  # the format: the text before, between and after them
    located(text, parts, ends, answers)

A template may strip answers or shorten them; then each ends at the next part of the format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed.errors import ConfigError, DataError

ROLES = ("system", "user", "assistant")

# Remarks on an answer; they are reported after the number of answers.
CHANGED = (
    "answers are trained as the chat template renders them, without a part (such as reasoning)"
)
BEGUN = (
    "answers begin with text of the chat template (such as its channel); it is "
    "trained, because the prompt of `mindspeed chat` ends before it"
)
NO_PROMPT = "answers before the first question follow no prompt and are not trained"
OTHER_PROMPT = (
    "answers follow another prompt than the one that the chat template writes to generate"
)


def switched(name: str, on: bool) -> str:
    """The remark on answers that follow a prompt other than the chat template's default."""
    what = "with" if on else "without"
    value = str(on).lower()
    return (
        f"conversations {what} reasoning follow the prompt of {name} = {value}: generate so with "
        f"`mindspeed chat --chat-template-kwargs '{{\"{name}\": {value}}}'`"
    )


Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: the whole text.
        spans: ``[start, end)`` characters of every answer with its stop token, in order.
        replaced: ``(start, end, text)``: the label of the token at ``[start, end)`` is the token
            ``text`` (formats without an end mark after earlier answers).
        remarks: per answer where it differs from the conversation, one of the constants above.
    """

    text: str
    spans: tuple[Span, ...]
    replaced: tuple[tuple[int, int, str], ...] = ()
    remarks: tuple[str, ...] = ()


class ChangedAnswerError(DataError):
    """An earlier answer is rendered otherwise than when it was the last one."""


class ChatTemplate(ABC):
    """Renders conversations as text.

    Attributes:
        name: as given to :func:`load`.
        stop: strings at which generation ends.
        special: strings that must be single tokens of the tokenizer.
        plain: whether the tokenizer should add its own special tokens (bos).
    """

    name: str
    stop: tuple[str, ...]
    special: tuple[str, ...]
    plain: bool

    @abstractmethod
    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Tools = (),
    ) -> Rendered:
        """Render a conversation.

        Args:
            messages: ``{"role": "system" | "user" | "assistant", "content": text}`` each; a
                system message comes first, an empty one suppresses the default. The chat template
                of a tokenizer may know more roles and fields, such as ``tool`` and ``tool_calls``.
                An answer with ``weight`` 0 is not to be trained, its span may be empty.
            add_generation_prompt: end with the start of an assistant message.
            tools: definitions of the tools that the assistant may call.

        Raises:
            DataError: the format does not support a role, a content, or what :meth:`check` refuses.
            ChangedAnswerError: an answer to train cannot be trained together with later ones.
        """

    def sample(
        self, messages: Sequence[Message], tools: Tools = (), thinking: bool | None = None
    ) -> Rendered:
        """Render a conversation to train on: each answer follows the prompt that generates it.

        Args:
            messages: as of :meth:`render`.
            tools: as of :meth:`render`.
            thinking: of which value of the template's switch the prompt is; by default whether the
                answers to train have reasoning.

        Raises:
            DataError: as :meth:`render`, or the reasoning of an answer would not be in the text.
            ChangedAnswerError: an answer to train cannot be trained together with later ones.
        """
        return self.render(messages, tools=tools)

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """The text of a conversation up to the start of the assistant's next message.

        Raises:
            DataError: the format does not support a role, a content or another field.
        """
        self.check(messages, tools)
        return self.render(messages, add_generation_prompt=True, tools=tools).text

    def check(self, messages: Sequence[Message], tools: Tools = ()) -> None:
        """Refuse what would not be in the text.

        Raises:
            DataError: a field of a message, or tools, that the format does not know.
        """
        for index, message in enumerate(messages):
            if unknown := self.not_rendered(message):
                raise DataError(
                    f"message {index + 1}: the chat template {self.name} does not render {unknown}"
                )
        if tools and not self.renders_tools:
            raise DataError(
                f"the chat template {self.name} does not render tools: give one that does with "
                "--prompt-type, such as hf, the tokenizer's"
            )

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """The template with values of its own variables, such as ``enable_thinking``.

        Raises:
            ConfigError: it has no such variable.
        """
        if variables:
            raise ConfigError(
                f"the chat template {self.name} has no variable {next(iter(variables))!r}: "
                "variables are those of a tokenizer's template (--prompt-type hf)"
            )
        return self

    @property
    def source(self) -> str:
        """The program of the template, empty where it has none."""
        return ""

    @property
    def renders_tools(self) -> bool:
        """Whether definitions of tools are a part of the text."""
        return False

    def not_rendered(self, message: Message) -> str | None:
        """The first field of a message that the format does not know; None if it knows all."""
        known = ("role", "content", "weight")
        return next((name for name in message if name not in known), None)


def checked(message: Any, index: int) -> tuple[str, str]:
    """Role and content of a message.

    Raises:
        DataError: the message is invalid; the error names it and the reason.
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
