"""The model as a function on texts: scores of continuations, and generated text.

Evaluation code works on texts; this module converts to token ids. Tests replace the model with a
stub that has the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from mindspeed.errors import ConfigError
from mindspeed.inference.loglikelihood import Score, loglikelihood
from mindspeed.inference.sampling import SamplingOptions

if TYPE_CHECKING:
    from mindspeed.inference.text_generator import TextGenerator

Encode = Callable[[str], list[int]]


class LanguageModel(Protocol):
    """The interface that an evaluation needs."""

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of prompt and answer."""
        ...

    def count(self, text: str) -> int:
        """Number of tokens."""
        ...

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """Log-probability of each continuation given its context, and whether it is greedy."""
        ...

    def generate(
        self, prompts: Sequence[str], stops: Sequence[str], max_new_tokens: int, seed: int
    ) -> list[str]:
        """Continuation of each prompt, up to the first of ``stops``."""
        ...


@dataclass(frozen=True)
class ModelAdapter:
    """A :class:`TextGenerator` as a :class:`LanguageModel`.

    Attributes:
        generator: The model, its tokenizer and its process groups.
        max_length: Maximum number of tokens of context and continuation.
        tokens_per_batch: Maximum tokens of a scoring pass.
        wrap: Plain prompt -> prompt of a chat.
        more_stops: Stop strings of the chat template.
    """

    generator: TextGenerator
    max_length: int
    sampling: SamplingOptions
    tokens_per_batch: int = 4096
    wrap: Callable[[str], str] = str
    more_stops: tuple[str, ...] = ()

    def count(self, text: str) -> int:
        return len(self.generator.encode(self.wrap(text)))

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        return loglikelihood(
            self.generator.stage,
            [self._tokens(self.wrap(context), continuation) for context, continuation in pairs],
            groups=self.generator.groups,
            vocab_size=self.generator.vocab_size,
            tokens_per_batch=self.tokens_per_batch,
        )

    def generate(
        self, prompts: Sequence[str], stops: Sequence[str], max_new_tokens: int, seed: int
    ) -> list[str]:
        options = replace(
            self.sampling,
            max_new_tokens=max_new_tokens,
            seed=seed,
            stop=(*stops, *self.more_stops),
        )
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ConfigError(
                f"--max-new-tokens {max_new_tokens}: the model's {self.max_length} positions leave "
                "no room for a prompt; lower it"
            )
        tokens = [self.generator.encode(self.wrap(prompt))[-room:] for prompt in prompts]
        return [completion.text for [completion] in self.generator.generate(tokens, options)]

    def _tokens(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        start = self.generator.start[0] if self.generator.start else self.generator.tokenizer.eod
        pair = encode_pair(self.generator.encode, context, continuation, start)
        return last_tokens(*pair, self.max_length)


def encode_pair(
    encode: Encode, context: str, continuation: str, start: int
) -> tuple[list[int], list[int]]:
    """Ids of a context and its continuation, tokenized jointly.

    Trailing spaces of the context move to the continuation, because most tokenizers join a space
    with the word after it.

    Args:
        encode: Text -> ids.
        context: May be empty; ``start`` then replaces it.
        continuation: The text to score.
        start: Id at the start of a text.

    Raises:
        ConfigError: The continuation has no token.
    """
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    if not bare:
        ids = encode(continuation)
        return ([start], ids) if ids[:1] != [start] else (ids[:1], ids[1:])
    before, whole = encode(bare), encode(bare + continuation)
    if len(whole) <= len(before):
        raise ConfigError(
            f"the tokenizer has no separate token for {continuation!r} after {bare[-20:]!r}; "
            "use --scoring generate"
        )
    return before, whole[len(before) :]


def last_tokens(
    context: list[int], continuation: list[int], max_length: int
) -> tuple[list[int], list[int]]:
    """Context and continuation, truncated on the left to what a model of ``max_length`` can see.

    The last token is only predicted, so ``max_length + 1`` tokens fit.
    """
    tokens = [*context, *continuation][-(max_length + 1) :]
    scored = min(len(continuation), len(tokens) - 1)
    return tokens[: len(tokens) - scored], tokens[len(tokens) - scored :]
