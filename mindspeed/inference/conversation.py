"""Conversations with a model: of a terminal, which grow, and of a file, which are answered.

The prompt of a conversation has as many of its messages as fit the context length. A file of
conversations is in OpenAI's form:

    {"messages": [...], "tools": [...], "chat_template_kwargs": {"enable_thinking": false}}

one such object or a list of messages (``.json``), several in a list, or one a line (``.jsonl``).
The fields of messages are those that training reads (:mod:`mindspeed.data.messages`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.data import templates
from mindspeed.data.chat_template import ChatTemplate
from mindspeed.data.messages import OPENAI, tagged
from mindspeed.data.record_fields import RecordFields
from mindspeed.errors import DataError, MindSpeedError
from mindspeed.inference.answers.call_formats import CallFormat
from mindspeed.inference.answers.question import Question, question_of, with_ends
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.parsing import parse_json, read_text

if TYPE_CHECKING:
    from mindspeed.inference.text_generator import TextGenerator


Message = Mapping[str, Any]


class Conversation:
    """The history of a chat.

    Args:
        generator: The model.
        template: Chat template.
        system: System message; empty for the template's default.
        turns: Maximum number of question-answer turns in the prompt; None for all that fit.
        calls: How the model writes calls of tools, and perhaps reasoning; None: in no known way.
    """

    def __init__(
        self,
        generator: TextGenerator,
        template: ChatTemplate,
        system: str = "",
        turns: int | None = None,
        calls: CallFormat | None = None,
    ) -> None:
        self._generator, self._template, self._turns = generator, template, turns
        self._calls = calls
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.history: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """All messages, the system message first."""
        return [*self._system, *self.history]

    def add_user_message(self, text: str, options: SamplingOptions) -> tuple[list[int], Question]:
        """Add a user message; drop the oldest turns until prompt and answer fit.

        Returns:
            The prompt's ids, and what reads its answer.

        Raises:
            DataError: The message alone is too long; it is not added.
        """
        history = [*self.history, {"role": "user", "content": text}]
        keep = len(history) // 2 if self._turns is None else min(self._turns, len(history) // 2)
        while True:
            kept = history[len(history) - 1 - 2 * keep :]
            messages = [*self._system, *map(self._rendered, kept)]
            question = question_of(self._template, messages, self._calls)
            tokens = self._generator.encode(question.text, start=question.plain)
            room = self._generator.context_length - options.max_new_tokens
            if len(tokens) <= room:
                self.history = kept
                return tokens, question
            if keep == 0:
                raise DataError(
                    f"the message is {len(tokens):,} tokens long, {max(room, 0):,} fit: the model "
                    f"has {self._generator.context_length:,} positions, --max-new-tokens "
                    f"{options.max_new_tokens} of them for the answer"
                )
            keep -= 1

    def _rendered(self, message: Message) -> Message:
        """A message without reasoning that the template has no place for."""
        if self._template.not_rendered(message) == "reasoning_content":
            return {name: message[name] for name in message if name != "reasoning_content"}
        return message

    def add_answer(self, message: Message) -> None:
        """Add the model's answer: its content, and its reasoning if there is any."""
        content = (message["content"] or "").strip()
        self.history.append({**message, "content": content})

    def clear(self) -> None:
        """Drop all messages but the system message."""
        self.history = []


def template_of(generator: TextGenerator, name: str | None) -> ChatTemplate:
    """The chat template ``name``, by default the tokenizer's.

    Raises:
        ConfigError: It is unknown, or the tokenizer is not a Hugging Face one.
        DataError: The tokenizer has no chat template.
    """
    tokenizer = generator.tokenizer if hasattr(generator.tokenizer, "directory") else None
    return templates.load(name or "hf", tokenizer)


_VARIABLES = "chat_template_kwargs"


@dataclass(frozen=True)
class Asked:
    """A conversation of a file.

    Attributes:
        where: File and place, for messages.
        messages: As chat templates take them; the last one is not an answer.
        tools: Definitions of tools that may be called.
        variables: Variables of the chat template.
        remarks: What is not used of it -> how often.
    """

    where: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    remarks: Mapping[str, int] = field(default_factory=dict)


def read_conversations(path: Path) -> list[Asked]:
    """The conversations of a file.

    Raises:
        DataError: It cannot be read, or a conversation is not valid; the error names its place.
    """
    found = [_asked(value, where) for where, value in _values(path)]
    if not found:
        raise DataError(f"{path} has no conversations")
    return found


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """Every conversation and its place."""
    text = read_text(path, str(path), DataError)
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, parse_json(line, where, DataError)
        return
    if path.suffix != ".json":
        raise DataError(f"{path}: a file of conversations is named .json or .jsonl")
    value = parse_json(text, str(path), DataError)
    several = isinstance(value, list) and not any(
        isinstance(one, dict) and "role" in one for one in value
    )
    if several:
        yield from ((f"{path}, conversation {n}", one) for n, one in enumerate(value, 1))
    else:
        yield str(path), value


def _asked(value: Any, where: str) -> Asked:
    record = {"messages": value} if isinstance(value, list) else value
    if not isinstance(record, dict):
        raise DataError(f"{where}: a conversation is an object with messages, or a list of them")
    variables = record.get(_VARIABLES) or {}
    if not isinstance(variables, dict):
        raise DataError(f"{where}: {_VARIABLES} is no object")
    fields = RecordFields({name: record[name] for name in record if name != _VARIABLES}, OPENAI)
    try:
        [messages] = tagged(fields)
        fields.check_rest()
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    if not messages or messages[-1]["role"] in ("assistant", "system"):
        raise DataError(f"{where}: the last message is not a question or the result of a tool")
    return Asked(where, messages, fields.tools, variables, fields.remarks)


def remarks_of(conversations: Sequence[Asked]) -> list[str]:
    """What is not used of the conversations, with its number."""
    total: Counter[str] = Counter()
    for one in conversations:
        total.update(one.remarks)
    return [f"{count:,} {remark}" for remark, count in total.items()]


def answer_all(
    generator: TextGenerator,
    template: ChatTemplate,
    conversations: Sequence[Asked],
    options: SamplingOptions,
    batch_size: int | None = None,
    calls: CallFormat | None = None,
) -> list[list[dict[str, Any]]]:
    """The answers to every conversation, as :meth:`.Question.answer` has them. Collective.

    Args:
        generator: The model.
        batch_size: Prompts in one pass.
        calls: How the model writes calls of tools; None: in no known way.

    Raises:
        DataError: The template cannot render a conversation, or the model has no room for it.
    """
    questions = [_question(template, one, options, calls) for one in conversations]
    prompts = [generator.encode(one.text, start=one.plain) for one in questions]
    found = generator.generate(prompts, with_ends(options, questions), batch_size, share=True)
    return [
        [question.answer(answer.text, answer.finish) for answer in answers]
        for question, answers in zip(questions, found, strict=True)
    ]


def _question(
    template: ChatTemplate, asked: Asked, options: SamplingOptions, calls: CallFormat | None
) -> Question:
    if asked.tools and calls is None:
        raise DataError(
            f"{asked.where}: it is unknown how this model writes calls of tools; "
            "name it with --tool-call-parser"
        )
    constrained = options.constraint is not None
    try:
        rendered = template.with_variables(asked.variables)
        return question_of(rendered, asked.messages, calls, asked.tools, constrained=constrained)
    except MindSpeedError as error:
        raise DataError(f"{asked.where}: {error}") from error
