"""Text generation: this rank's model stage, the tokenizer and the process groups in one object.

    generator = TextGenerator.of(load_model(Source("hf:models/llama"), world_size))
    [[completion]] = generator.generate(["The import statement"], SamplingOptions(greedy=True))
    for chunk in generator.stream(["Once upon a time"], SamplingOptions()):
        print(chunk.text, end="")

``mindspeed generate``, ``chat`` and ``serve``, ``GPTModel.generate`` and the evaluation use
it. Its methods are collective: every rank of the model calls them with the same arguments and gets
the same results. Invalid arguments are refused on every rank alike, before the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from mindspeed.data.tokenizer_types import TextTokenizer, token_bytes
from mindspeed.flags import read
from mindspeed.inference.beam_search import Hypothesis, beam_search
from mindspeed.inference.generate import TokenScores, check_prompts, decode_steps
from mindspeed.inference.grammar import Grammars, Matcher
from mindspeed.inference.load import LoadedModel
from mindspeed.inference.parallel_groups import ModelParallelGroups
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.inference.text_stream import TextStream, truncate_at_stop
from mindspeed.models.model_config import ModelConfig

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt.

    Attributes:
        tokens: New token ids, without the end token.
        text: Their text, up to the first stop string.
        finish: ``"stop"`` (end token or stop string) or ``"length"``.
        scores: Log-probabilities of ``tokens``, if requested.
        score: Score of a finished beam, log-probability / length ** length_penalty.
    """

    tokens: list[int]
    text: str
    finish: str
    scores: list[TokenScores] | None = None
    score: float | None = None


@dataclass(frozen=True)
class OutputChunk:
    """Output that one step adds to a sequence.

    Attributes:
        index: Sequence; continuation ``j`` of prompt ``i`` is ``i * num_return_sequences + j``.
        text: New text; empty while a character or a stop string may be incomplete.
        token: New token id; None in a last chunk that only ends the sequence.
        scores: Log-probabilities of ``token``, if requested.
        finish: As in :class:`Completion`, in the last chunk of a sequence.
        end: The end token, if it has scores; it is not part of the text.
    """

    index: int
    text: str
    token: int | None = None
    scores: TokenScores | None = None
    finish: str | None = None
    end: int | None = None


@dataclass(frozen=True)
class TextGenerator:
    """A model, its tokenizer and its process groups.

    Attributes:
        stage: This rank's stage, a ``GPTModel`` without wrappers.
        tokenizer: Text to ids and back.
        groups: Process groups of the model.
        eos: Ids that end a text.
        start: Ids that every text begins with (bos), if the model was trained with them.
        model_vocab_size: Vocabulary of the model without padding; in many published models larger
            than the tokenizer's. None: the tokenizer's.
        grammars: Compiled for its vocabulary.
    """

    stage: Any
    tokenizer: TextTokenizer
    groups: ModelParallelGroups
    eos: frozenset[int]
    start: tuple[int, ...] = ()
    model_vocab_size: int | None = None
    grammars: Grammars = field(default_factory=Grammars)

    @classmethod
    def of(cls, loaded: LoadedModel) -> TextGenerator:
        """A generator of a model of :func:`mindspeed.inference.load.load_model`."""
        groups = ModelParallelGroups.of_megatron()
        vocab_size = read(ModelConfig, loaded.args).vocab_size
        return cls(loaded.stage, loaded.tokenizer, groups, loaded.eos, loaded.start, vocab_size)

    def matcher(self, options: SamplingOptions) -> Matcher | None:
        """Keeps a new sequence to the options' constraint, if there is one.

        Raises:
            ConfigError: The constraint is not valid.
        """
        if options.constraint is None:
            return None
        return self.grammars.matcher(self, options.constraint, self.end_tokens(options))

    @property
    def vocab_size(self) -> int:
        """Number of ids that can be sampled, counted as transformers does."""
        return max(self.model_vocab_size or 0, self.tokenizer.vocab_size)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids; ids beyond the tokenizer's vocabulary have none."""
        limit = self.tokenizer.vocab_size
        return self.tokenizer.detokenize([token for token in ids if token < limit])

    def detokenizer(self, shown: Sequence[str]) -> Callable[[Sequence[int]], str]:
        """A :meth:`detokenize` that shows these special tokens as text."""
        found = {self.tokenizer.token_id(text): text for text in shown}
        special = {
            t: text for t, text in found.items() if t is not None and not self.detokenize([t])
        }
        if not special:
            return self.detokenize

        def detokenize(ids: Sequence[int]) -> str:
            text, plain = "", list[int]()
            for token in ids:
                if token in special:
                    text, plain = text + self.detokenize(plain) + special[token], []
                else:
                    plain.append(token)
            return text + self.detokenize(plain)

        return detokenize

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which may be a part of a character."""
        return token_bytes(self.tokenizer, token) if token < self.tokenizer.vocab_size else b""

    @property
    def context_length(self) -> int:
        """Positions the model was trained for."""
        return int(self.stage.max_sequence_length)

    def encode(self, prompt: Prompt, start: bool = True) -> list[int]:
        """Ids of a prompt; an empty one becomes the start of a document.

        Args:
            prompt: A text, or ids, which stay as they are.
            start: Prepend :attr:`start` to a text; False for texts that spell out their bos.
        """
        if isinstance(prompt, str):
            tokens = self.tokenizer.tokenize(prompt) if prompt else []
            if start and tuple(tokens[: len(self.start)]) != self.start:
                tokens = [*self.start, *tokens]
        else:
            tokens = [int(token) for token in prompt]
        return tokens or [*self.start] or [self.tokenizer.eod]

    def generate(
        self,
        prompts: Sequence[Prompt],
        options: SamplingOptions,
        batch_size: int | None = None,
        *,
        share: bool = False,
    ) -> list[list[Completion]]:
        """Continue every prompt ``num_return_sequences`` times.

        Args:
            prompts: Texts or ids.
            batch_size: Prompts per batch; default all. Prompts of similar length share a batch;
                batching does not change the output.
            share: Divide the prompts between data-parallel replicas; all ranks get all results.
                Otherwise every replica processes the prompts that it is given.

        Raises:
            DataError: A prompt has ids outside the vocabulary, or is too long for the model.
        """
        tokens = [self.encode(prompt) for prompt in prompts]
        check_prompts(self.stage, tokens, options, self.vocab_size)  # all before any runs
        order = sorted(range(len(tokens)), key=lambda index: -len(tokens[index]))
        replicas = self.groups.dp if share else None
        if replicas is not None:
            order = order[replicas.rank() :: replicas.size()]
        size = batch_size or max(1, len(order))
        results: dict[int, list[Completion]] = {}
        for first in range(0, len(order), size):
            indices = order[first : first + size]
            batch = [tokens[index] for index in indices]
            complete = self._beam_search if options.num_beams > 1 else self._sample
            results |= zip(indices, complete(batch, options, indices), strict=True)
        if replicas is not None and replicas.size() > 1:
            parts: list[Any] = [None] * replicas.size()
            dist.all_gather_object(parts, results, group=replicas)
            results = {index: found for part in parts for index, found in part.items()}
        return [results[index] for index in range(len(tokens))]

    def stream(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[OutputChunk]:
        """Continue prompts and yield their text as it is generated. Not with beam search.

        Raises:
            DataError: A prompt has ids outside the vocabulary, or is too long for the model.
        """
        tokens = [self.encode(prompt) for prompt in prompts]
        return self._stream(tokens, options, range(len(tokens) * options.num_return_sequences))

    def end_tokens(self, options: SamplingOptions) -> frozenset[int]:
        """End token ids, including stop strings that are one token: special tokens have no text."""
        found = {self.tokenizer.token_id(stop) for stop in options.stop}
        return self.eos | {token for token in found if token is not None}

    def _stream(
        self, prompts: Sequence[list[int]], options: SamplingOptions, seed_offsets: Sequence[int]
    ) -> Iterator[OutputChunk]:
        detokenize, copies = self.detokenizer(options.shown), options.num_return_sequences
        texts = [
            TextStream(detokenize, prompt, options.stop)
            for prompt in prompts
            for _ in range(copies)
        ]
        new_text: dict[int, str] = {}
        matchers = [matcher for _ in texts if (matcher := self.matcher(options))]

        def should_stop(index: int, token: int) -> bool:
            new_text[index] = texts[index].push(token)
            return texts[index].stopped

        for step in decode_steps(
            self.stage,
            prompts,
            options,
            groups=self.groups,
            vocab_size=self.vocab_size,
            eos=self.end_tokens(options),
            should_stop=should_stop,
            seed_offsets=seed_offsets,
            matchers=matchers,
        ):
            for index in sorted(step.tokens.keys() | step.finished.keys()):
                finish = step.finished.get(index)
                text = new_text.pop(index, "") + (texts[index].finish() if finish else "")
                finish = "stop" if finish and texts[index].stopped else finish
                token, scores = step.tokens.get(index), step.scores.get(index)
                yield OutputChunk(index, text, token, scores, finish)

    def _sample(
        self, prompts: Sequence[list[int]], options: SamplingOptions, indices: Sequence[int]
    ) -> list[list[Completion]]:
        copies = options.num_return_sequences
        offsets = [index * copies + copy for index in indices for copy in range(copies)]
        builders = [_CompletionBuilder() for _ in offsets]
        for chunk in self._stream(prompts, options, offsets):
            builders[chunk.index].add(chunk)
        done = [builder.completion(options) for builder in builders]
        return [done[i : i + copies] for i in range(0, len(done), copies)]

    def _beam_search(
        self, prompts: Sequence[list[int]], options: SamplingOptions, indices: Sequence[int]
    ) -> list[list[Completion]]:
        detokenize = self.detokenizer(options.shown)

        def text(index: int, tokens: Sequence[int]) -> str:
            stream = TextStream(detokenize, prompts[index], options.stop)
            return "".join(stream.push(token) for token in tokens) + stream.finish()

        def should_stop(index: int, tokens: Sequence[int]) -> bool:
            whole = detokenize(tokens)
            return truncate_at_stop(whole, options.stop) != whole

        def completion(index: int, hypothesis: Hypothesis) -> Completion:
            tokens = list(hypothesis.tokens)
            scores = [TokenScores(value) for value in hypothesis.logprobs]
            return Completion(
                tokens,
                text(index, tokens),
                hypothesis.finish,
                None if options.logprobs is None else scores,
                hypothesis.score,
            )

        found = beam_search(
            self.stage,
            prompts,
            options,
            groups=self.groups,
            vocab_size=self.vocab_size,
            eos=self.end_tokens(options),
            should_stop=should_stop if options.stop else None,
            seed_offsets=indices,
        )
        return [[completion(i, hypothesis) for hypothesis in best] for i, best in enumerate(found)]


class _CompletionBuilder:
    """Collects the chunks of one sequence."""

    def __init__(self) -> None:
        self._completion = Completion([], "", "", [])

    def add(self, chunk: OutputChunk) -> None:
        so_far = self._completion
        if chunk.token is not None:
            so_far.tokens.append(chunk.token)
        if chunk.scores is not None:
            so_far.scores.append(chunk.scores)  # type: ignore[union-attr]
        self._completion = replace(
            so_far, text=so_far.text + chunk.text, finish=chunk.finish or so_far.finish
        )

    def completion(self, options: SamplingOptions) -> Completion:
        return (
            replace(self._completion, scores=None) if options.logprobs is None else self._completion
        )
