"""Prompts, arguments and results of ``generate`` in Hugging Face's conventions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.errors import ConfigError, DataError
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.inference.text_generator import Completion, TextGenerator


@dataclass(frozen=True)
class Prompts:
    """Normalised prompts.

    Attributes:
        entries: Texts, or lists of ids without padding.
        single: The caller gave one prompt, not a list of prompts.
    """

    entries: list[str | list[int]]
    single: bool

    @classmethod
    def of(
        cls,
        given: Any,
        attention_mask: torch.Tensor | None = None,
        pad_token_id: int | None = None,
    ) -> Prompts:
        """Normalise the prompts of a caller.

        Args:
            given: A text, ids, a list of either, or an integer tensor ``[s]`` or ``[b, s]``.
            attention_mask: ``[b, s]``, 0 at padding; only with a tensor.
            pad_token_id: Padding id at the start of a tensor, if there is no mask.

        Raises:
            DataError: It has another form.
        """
        if isinstance(given, torch.Tensor):
            return cls._of_tensor(given, attention_mask, pad_token_id)
        if attention_mask is not None:
            raise DataError("attention_mask needs a tensor of ids; lists have no padding")
        if isinstance(given, str):
            return cls([given], True)
        if not isinstance(given, Sequence) or isinstance(given, bytes):
            raise DataError(
                f"input_ids is a {type(given).__name__}; a text, token ids, a list of either or a "
                "tensor is expected"
            )
        if given and all(_is_id(item) for item in given):
            return cls([[int(item) for item in given]], True)
        return cls([_entry(item, index) for index, item in enumerate(given)], False)

    @classmethod
    def _of_tensor(
        cls, given: torch.Tensor, attention_mask: torch.Tensor | None, pad_token_id: int | None
    ) -> Prompts:
        if given.dim() not in (1, 2) or given.is_floating_point():
            raise DataError(
                f"input_ids is a tensor of shape {list(given.shape)} and dtype {given.dtype}; "
                "integer ids [s] or [b, s] are expected"
            )
        batch = given[None] if given.dim() == 1 else given
        if attention_mask is not None:
            mask = attention_mask.reshape(batch.shape).bool()
            if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
                raise DataError(
                    "attention_mask: padding is expected on the left (tokenizer.padding_side)"
                )
        elif pad_token_id is not None:
            mask = (batch != pad_token_id).long().cumsum(-1) > 0
        else:
            mask = torch.ones_like(batch, dtype=torch.bool)
        return cls(
            [ids[keep].tolist() for ids, keep in zip(batch, mask, strict=True)], given.dim() == 1
        )


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _entry(item: Any, index: int) -> str | list[int]:
    if isinstance(item, str):
        return item
    if isinstance(item, torch.Tensor) and item.dim() == 1:
        return item.tolist()
    if isinstance(item, Sequence) and all(_is_id(token) for token in item):
        return [int(token) for token in item]
    raise DataError(f"prompt {index} is neither a text nor a list of token ids: {item!r:.60}")


_DEFAULT_MAX_LENGTH = 128


@dataclass(frozen=True)
class OutputFormat:
    """The form in which continuations are returned.

    Attributes:
        detokenize: Text; otherwise lists of ids.
        include_input: The prompt precedes its continuation.
        log_probs: Also the log-probability of every new token.
    """

    detokenize: bool
    include_input: bool
    log_probs: bool

    def results(
        self,
        generator: TextGenerator,
        prompts: Prompts,
        tokens: list[list[int]],
        options: SamplingOptions,
    ) -> Any:
        """Generate; one result for one continuation of a single prompt, otherwise a list.

        Args:
            generator: The model.
            prompts: As given by the caller.
            tokens: Ids of each prompt.
        """
        results, log_probs = [], []
        for index, completions in enumerate(generator.generate(tokens, options, share=True)):
            for completion in completions:
                results.append(
                    self._result(generator, prompts.entries[index], tokens[index], completion)
                )
                log_probs.append([score.sampled for score in completion.scores or ()])
        if prompts.single and options.num_return_sequences == 1:
            return (results[0], log_probs[0]) if self.log_probs else results[0]
        return (results, log_probs) if self.log_probs else results

    def stream(
        self,
        generator: TextGenerator,
        prompts: Prompts,
        tokens: list[list[int]],
        options: SamplingOptions,
    ) -> Iterator[Any]:
        """Generate one continuation of one prompt and yield it chunk by chunk.

        Raises:
            ConfigError: There are several prompts, continuations or beams.
        """
        if len(tokens) != 1 or options.num_return_sequences != 1 or options.num_beams != 1:
            raise ConfigError(
                "stream=True continues one prompt once and without beams; call generate() for "
                "each prompt, or without stream"
            )
        return self._chunks(generator, prompts, tokens, options)

    def _chunks(
        self,
        generator: TextGenerator,
        prompts: Prompts,
        tokens: list[list[int]],
        options: SamplingOptions,
    ) -> Iterator[Any]:
        if self.include_input:
            empty = Completion([], "", "")
            first = self._result(generator, prompts.entries[0], tokens[0], empty)
            yield (first, []) if self.log_probs else first
        for chunk in generator.stream(tokens, options):
            ids = [] if chunk.token is None else [chunk.token]
            new = chunk.text if self.detokenize else ids
            if self.log_probs:
                yield new, [] if chunk.scores is None else [chunk.scores.sampled]
            elif new:
                yield new

    def _result(
        self, generator: TextGenerator, prompt: Any, tokens: list[int], completion: Completion
    ) -> Any:
        if not self.detokenize:
            return [*tokens, *completion.tokens] if self.include_input else completion.tokens
        if not self.include_input:
            return completion.text
        text = prompt if isinstance(prompt, str) else generator.detokenize(tokens)
        return text + completion.text


def new_token_limit(tokens: list[list[int]], max_length: int | None, max_new_tokens: int) -> int:
    """Maximum number of new tokens, from ``max_length`` or ``max_new_tokens``.

    Raises:
        ConfigError: Both are given.
        DataError: The longest prompt leaves no room in ``max_length``.
    """
    if max_length is not None and max_new_tokens:
        raise ConfigError(
            f"max_length={max_length} and max_new_tokens={max_new_tokens}: give one of them; "
            "max_length includes the prompt"
        )
    if max_new_tokens:
        return max_new_tokens
    limit = _DEFAULT_MAX_LENGTH if max_length is None else max_length
    longest = max(map(len, tokens), default=0)
    if longest >= limit:
        raise DataError(
            f"a prompt of {longest:,} tokens leaves no room in max_length={limit:,}; raise it, or "
            "give max_new_tokens"
        )
    return limit - longest
