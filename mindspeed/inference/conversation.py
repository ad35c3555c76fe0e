"""A conversation: its messages, and the prompt of as many of them as fit the context length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed.data import templates
from mindspeed.data.chat_template import ChatTemplate
from mindspeed.errors import DataError
from mindspeed.inference.answers.call_formats import CallFormat
from mindspeed.inference.answers.question import Question, question_of
from mindspeed.inference.sampling import SamplingOptions
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
