"""A conversation that a model is to continue: its prompt, and what ends and reads the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed.data.chat_template import ChatTemplate
from mindspeed.inference.answers.call_formats import (
    JSON_LIST,
    CallFormat,
    ChannelFormat,
    JsonFormat,
    TaggedFormat,
    reasoning_of,
)
from mindspeed.inference.answers.harmony import ChannelReader
from mindspeed.inference.answers.parser import AnswerParser
from mindspeed.inference.answers.parts import message_of
from mindspeed.inference.sampling import SamplingOptions


@dataclass(frozen=True)
class Question:
    """What a model is asked.

    Attributes:
        text: The prompt, which ends with the start of the assistant's message.
        plain: The tokenizer adds its own special tokens to it.
        calls: How the answer writes calls; None: it has none.
        reasoning: What begins and ends its reasoning.
        tools: Definitions of the tools that it may call.
        stop: Strings that end it.
    """

    text: str
    plain: bool
    calls: CallFormat | None
    reasoning: tuple[str, str] | None
    tools: Sequence[Mapping[str, Any]]
    stop: tuple[str, ...]

    @property
    def shown(self) -> tuple[str, ...]:
        """Special tokens that are a part of the answer."""
        return (*(self.calls.shown if self.calls else ()), *(self.reasoning or ()))

    def parser(self) -> AnswerParser | ChannelReader:
        """What reads one answer."""
        if isinstance(self.calls, ChannelFormat):
            return ChannelReader(self.calls, bool(self.tools))
        thinking = self.reasoning is not None and self.text.rstrip().endswith(self.reasoning[0])
        assert self.calls is None or isinstance(self.calls, JsonFormat | TaggedFormat)
        return AnswerParser(self.calls, self.reasoning, thinking, self.tools)

    def answer(self, text: str, finish: str) -> dict[str, Any]:
        """The message of a whole answer, and ``finish_reason``.

        Args:
            text: The answer.
            finish: Why it ended, as in :class:`~mindspeed.inference.text_generator.Completion`.
        """
        parser = self.parser()
        message = message_of(parser.push(text) + parser.finish())
        called = finish == "stop" and "tool_calls" in message
        return {**message, "finish_reason": "tool_calls" if called else finish}


def question_of(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    calls: CallFormat | None,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    constrained: bool = False,
    demands_call: bool = False,
) -> Question:
    """The question that a conversation asks.

    Args:
        messages: The conversation.
        calls: How the model writes calls of tools; None: in no known way.
        tools: Definitions of the tools that it may call.
        constrained: A grammar says what the answer is, from its first token on.
        demands_call: The grammar is that of a list of calls.

    Raises:
        DataError: The template cannot render a message, or tools.
    """
    text = template.prompt(messages, tools)
    channels = isinstance(calls, ChannelFormat)
    reasoning = None if channels else reasoning_of(template.source)
    if constrained:
        text += calls.answer_header if calls else ""
        calls, reasoning = JSON_LIST if demands_call else None, None
    elif not tools and not channels:
        calls = None
    stop = (*template.stop, *(calls.stops if calls else ()))
    return Question(text, template.plain, calls, reasoning, tools, stop)


def with_ends(options: SamplingOptions, questions: Sequence[Question]) -> SamplingOptions:
    """``options`` with what ends the answers to these questions, and is shown of them."""
    stop = (*options.stop, *(text for question in questions for text in question.stop))
    shown = (*options.shown, *(text for question in questions for text in question.shown))
    return replace(options, stop=tuple(dict.fromkeys(stop)), shown=tuple(dict.fromkeys(shown)))
