"""Conversations of a file, in OpenAI's form, and what a model answers to each of them.

    {"messages": [...], "tools": [...], "chat_template_kwargs": {"enable_thinking": false}}

A file is one such object or a list of messages (``.json``), several in a list, or one a line
(``.jsonl``). The fields of messages are those that training reads (:mod:`mindspeed.data.messages`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.data.chat_template import ChatTemplate
from mindspeed.data.messages import OPENAI, tagged
from mindspeed.data.record_fields import Fields
from mindspeed.errors import DataError, MindSpeedError
from mindspeed.inference.answers.call_formats import CallFormat
from mindspeed.inference.answers.question import Question, question_of, with_ends
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.parsing import parse_json, read_text

if TYPE_CHECKING:  # a command reads conversations before anything of Megatron is loaded
    from mindspeed.inference.text_generator import TextGenerator

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
    fields = Fields({name: record[name] for name in record if name != _VARIABLES}, OPENAI)
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
