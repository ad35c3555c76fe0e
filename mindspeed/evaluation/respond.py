"""Who answers: a model on its ranks, seen as a function from texts to numbers or texts.

Everything above this module works with text; token ids begin here. A stand-in with the same three
methods takes a model's place in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mindspeed.data.tokenizer import TextTokenizer
from mindspeed.errors import ConfigError
from mindspeed.inference.generate import ModelRanks, stream
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.inference.score import Score, loglikelihood

Encode = Callable[[str], list[int]]


class Respondent(Protocol):
    """What an evaluation needs of a model."""

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer together."""
        ...

    def count(self, text: str) -> int:
        """Number of tokens."""
        ...

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """Log-probability of each continuation after its context, and whether it is greedy."""
        ...

    def generate(
        self, prompts: Sequence[str], stops: Sequence[str], max_new_tokens: int, seed: int
    ) -> list[str]:
        """Text after each prompt, up to the first of ``stops``."""
        ...


@dataclass(frozen=True)
class ModelRespondent:
    """A model of this process and its neighbours.

    Attributes:
        stage: This rank's stage, without wrappers.
        tokenizer: Text <-> ids.
        ranks: The ranks that hold the model.
        max_length: Tokens of context and continuation together.
        sampling: How generated tokens are chosen.
        tokens_per_batch: Size of a scoring pass.
        wrap: Makes the prompt of a conversation out of a plain one.
        more_stops: What ends an answer in a conversation.
    """

    stage: Any
    tokenizer: TextTokenizer
    ranks: ModelRanks
    max_length: int
    sampling: SamplingOptions
    tokens_per_batch: int = 4096
    wrap: Callable[[str], str] = str
    more_stops: tuple[str, ...] = ()

    def count(self, text: str) -> int:
        return len(self.tokenizer.tokenize(self.wrap(text)))

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        encode, start = self.tokenizer.tokenize, self.tokenizer.eod
        encoded = (encode_pair(encode, self.wrap(text), more, start) for text, more in pairs)
        tokens = [last_tokens(*pair, self.max_length) for pair in encoded]
        return loglikelihood(
            self.stage,
            tokens,
            ranks=self.ranks,
            vocab_size=self.tokenizer.vocab_size,
            tokens_per_batch=self.tokens_per_batch,
        )

    def generate(
        self, prompts: Sequence[str], stops: Sequence[str], max_new_tokens: int, seed: int
    ) -> list[str]:
        room = self.max_length - max_new_tokens
        tokens = [self.tokenizer.tokenize(self.wrap(prompt))[-room:] for prompt in prompts]
        options = replace(self.sampling, max_new_tokens=max_new_tokens, seed=seed)
        return generate_until(self, tokens, (*stops, *self.more_stops), options)


def encode_pair(
    encode: Encode, context: str, continuation: str, start: int
) -> tuple[list[int], list[int]]:
    """Ids of a context and of what follows, as they are in the joint text.

    Blanks at the end of the context move to the continuation: most tokenizers join a blank with the
    word behind it. Both are then cut out of the ids of the whole text.

    Args:
        encode: Text -> ids.
        context: May be empty: then ``start`` takes its place.
        continuation: What is scored.
        start: The id in front of a text.

    Raises:
        ConfigError: The tokenizer gives the continuation no token of its own.
    """
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    if not bare:
        ids = encode(continuation)
        return ([start], ids) if ids[:1] != [start] else (ids[:1], ids[1:])
    before, whole = encode(bare), encode(bare + continuation)
    if len(whole) <= len(before):
        raise ConfigError(
            f"the tokenizer gives {continuation!r} no token of its own behind {bare[-20:]!r}; "
            "use --scoring generate"
        )
    return before, whole[len(before) :]


def last_tokens(
    context: list[int], continuation: list[int], max_length: int
) -> tuple[list[int], list[int]]:
    """Context and continuation without what a model of ``max_length`` cannot see.

    The last token is only predicted, so ``max_length + 1`` of them fit.
    """
    tokens = [*context, *continuation][-(max_length + 1) :]
    scored = min(len(continuation), len(tokens) - 1)
    return tokens[: len(tokens) - scored], tokens[len(tokens) - scored :]


def generate_until(
    model: ModelRespondent,
    prompts: Sequence[list[int]],
    stops: Sequence[str],
    options: SamplingOptions,
) -> list[str]:
    """Text after each prompt; ends with the batch's last row, at its stop text or at ``eod``."""
    tokenizer = model.tokenizer
    rows: list[list[int]] = [[] for _ in prompts]
    texts = [""] * len(prompts)
    stopped = [False] * len(prompts)
    steps = stream(
        model.stage,
        [prompt or [tokenizer.eod] for prompt in prompts],
        options,
        ranks=model.ranks,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
    )
    for step in steps:
        for row, token in step.items():
            if not stopped[row]:
                rows[row].append(token)
                texts[row] = tokenizer.detokenize(rows[row])
                stopped[row] = any(stop in texts[row] for stop in stops)
        if all(stopped):  # every rank has the same tokens, so all leave at the same step
            break
    return texts
