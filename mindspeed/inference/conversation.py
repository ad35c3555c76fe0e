"""A conversation: messages to a prompt that fits, and the answer's place in the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mindspeed.data import templates
from mindspeed.data.templates import ChatTemplate
from mindspeed.errors import DataError
from mindspeed.inference.generator import Generator
from mindspeed.inference.sampling import SamplingOptions

Message = Mapping[str, str]


class Conversation:
    """What was said so far.

    Args:
        generator: The model that answers.
        template: How messages become text.
        system: Stands before everything; empty for the template's own.
        turns: Questions and answers to remember, at most; None for all that fit.
    """

    def __init__(
        self,
        generator: Generator,
        template: ChatTemplate,
        system: str = "",
        turns: int | None = None,
    ) -> None:
        self._generator, self._template, self._turns = generator, template, turns
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.history: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """Everything, the system message first."""
        return [*self._system, *self.history]

    def ask(self, question: str, options: SamplingOptions) -> list[int]:
        """Add a question; forget the oldest turns until prompt and answer fit.

        Returns:
            The prompt's ids.

        Raises:
            DataError: Even the question alone is too long; it is not added.
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
                    f"the question is {len(tokens):,} tokens long, {max(room, 0):,} fit: the model "
                    f"has {self._generator.context_length:,} positions, --max-new-tokens "
                    f"{options.max_new_tokens} of them for the answer"
                )
            keep -= 1

    def answered(self, text: str) -> None:
        """Add the answer to the last question."""
        self.history.append({"role": "assistant", "content": text})

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.history = []


def prompt_of(
    generator: Generator, template: ChatTemplate, messages: Sequence[Message]
) -> list[int]:
    """Ids of a conversation up to where the assistant speaks.

    Raises:
        DataError: The template has no place for a message.
    """
    text = template.render(messages, add_generation_prompt=True).text
    return generator.encode(text, start=template.plain)


def template_of(generator: Generator, name: str | None) -> ChatTemplate:
    """The template ``name``, by default the tokenizer's own.

    Raises:
        ConfigError: It is unknown, or the tokenizer is none of Hugging Face's.
        DataError: The tokenizer has none.
    """
    tokenizer = generator.tokenizer if hasattr(generator.tokenizer, "directory") else None
    return templates.load(name or "hf", tokenizer)


def with_stops(options: SamplingOptions, template: ChatTemplate) -> SamplingOptions:
    """Options under which an answer ends where the template ends it."""
    return replace(options, stop=tuple(dict.fromkeys((*options.stop, *template.stop))))
