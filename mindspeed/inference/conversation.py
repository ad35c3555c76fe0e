"""A conversation: its messages, and the prompt of as many of them as fit the context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindspeed.data import templates
from mindspeed.data.chat_template import ChatTemplate
from mindspeed.errors import DataError
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.inference.text_generator import TextGenerator

Message = Mapping[str, str]


class Conversation:
    """The history of a chat.

    Args:
        generator: The model.
        template: Chat template.
        system: System message; empty for the template's default.
        turns: Maximum number of question-answer turns in the prompt; None for all that fit.
    """

    def __init__(
        self,
        generator: TextGenerator,
        template: ChatTemplate,
        system: str = "",
        turns: int | None = None,
    ) -> None:
        self._generator, self._template, self._turns = generator, template, turns
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.history: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """All messages, the system message first."""
        return [*self._system, *self.history]

    def add_user_message(self, question: str, options: SamplingOptions) -> list[int]:
        """Add a user message; drop the oldest turns until prompt and answer fit.

        Returns:
            The prompt's ids.

        Raises:
            DataError: The message alone is too long; it is not added.
        """
        history = [*self.history, {"role": "user", "content": question}]
        keep = len(history) // 2 if self._turns is None else min(self._turns, len(history) // 2)
        while True:
            kept = history[len(history) - 1 - 2 * keep :]
            tokens = prompt_of(self._generator, self._template, [*self._system, *kept])
            room = self._generator.context_length - options.max_new_tokens
            if len(tokens) <= room:
                self.history = kept
                return tokens
            if keep == 0:
                raise DataError(
                    f"the message is {len(tokens):,} tokens long, {max(room, 0):,} fit: the model "
                    f"has {self._generator.context_length:,} positions, --max-new-tokens "
                    f"{options.max_new_tokens} of them for the answer"
                )
            keep -= 1

    def add_assistant_message(self, text: str) -> None:
        """Add the model's answer."""
        self.history.append({"role": "assistant", "content": text})

    def clear(self) -> None:
        """Drop all messages but the system message."""
        self.history = []


def prompt_of(
    generator: TextGenerator, template: ChatTemplate, messages: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Token ids of a conversation, ending with the start of the assistant's message.

    Raises:
        DataError: The template cannot render a message.
    """
    return generator.encode(template.prompt(messages), start=template.plain)


def template_of(generator: TextGenerator, name: str | None) -> ChatTemplate:
    """The chat template ``name``, by default the tokenizer's.

    Raises:
        ConfigError: It is unknown, or the tokenizer is not a Hugging Face one.
        DataError: The tokenizer has no chat template.
    """
    tokenizer = generator.tokenizer if hasattr(generator.tokenizer, "directory") else None
    return templates.load(name or "hf", tokenizer)


def with_stops(options: SamplingOptions, template: ChatTemplate) -> SamplingOptions:
    """``options`` with the template's stop strings added."""
    return replace(options, stop=tuple(dict.fromkeys((*options.stop, *template.stop))))
