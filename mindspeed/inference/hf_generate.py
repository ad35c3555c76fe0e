"""Arguments and results of ``generate`` in Hugging Face's conventions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed.errors import ConfigError, DataError
from mindspeed.inference.prompts import Prompts
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.inference.text_generator import Completion, TextGenerator

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
            options: Sampling options.
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
