"""A model that continues text: this rank's stage, the tokenizer and the ranks in one object.

    generator = Generator.of(load_model(Source("hf:models/llama"), world_size))
    [[completion]] = generator.generate(["The import statement"], SamplingOptions(greedy=True))
    for piece in generator.pieces(["Once upon a time"], SamplingOptions()):
        print(piece.text, end="")

``mindspeed generate``, ``chat`` and ``serve``, ``GPTModel.generate`` and the evaluation share it.
Its methods are collective: every rank of the model calls them with the same arguments and gets the
same results. Whatever can be wrong with the arguments is found on every rank alike, before the
model runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from mindspeed.data.tokenizer import TextTokenizer
from mindspeed.inference.beams import Hypothesis, beam_search
from mindspeed.inference.generate import TokenScores, check_prompts, steps
from mindspeed.inference.load import LoadedModel
from mindspeed.inference.ranks import ModelRanks
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.inference.text import TextStream, cut_at_stop

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt.

    Attributes:
        tokens: New ids, without the one that ended it.
        text: Their text, up to the first stop string.
        finish: ``"stop"`` (end token, stop string) or ``"length"``.
        scores: Log-probabilities of ``tokens``, where asked for.
        score: Of a finished beam: log-probability / length ** length_penalty.
    """

    tokens: list[int]
    text: str
    finish: str
    scores: list[TokenScores] | None = None
    score: float | None = None


@dataclass(frozen=True)
class Piece:
    """What a step adds to a continuation.

    Attributes:
        row: Continuation ``j`` of prompt ``i`` is row ``i * num_return_sequences + j``.
        text: New text; empty while a character or a stop string may be unfinished.
        token: New id; None in a last piece that only ends the row.
        scores: Log-probabilities of ``token``, where asked for.
        finish: As in :class:`Completion`, in the last piece of a row.
        end: The token that ended the row, where it is scored although it is no part of the text.
    """

    row: int
    text: str
    token: int | None = None
    scores: TokenScores | None = None
    finish: str | None = None
    end: int | None = None


@dataclass(frozen=True)
class Generator:
    """A model, its tokenizer and its ranks.

    Attributes:
        stage: This rank's stage, a ``GPTModel`` without wrappers.
        tokenizer: Text to ids and back.
        ranks: The ranks that hold the model.
        eos: Ids that end a text.
        start: Ids that every text begins with (bos), where the model was trained so.
        entries: Of the model's vocabulary, without the rows that padding added; more than the
            tokenizer has in many published models. None: as many as the tokenizer has.
    """

    stage: Any
    tokenizer: TextTokenizer
    ranks: ModelRanks
    eos: frozenset[int]
    start: tuple[int, ...] = ()
    entries: int | None = None

    @classmethod
    def of(cls, loaded: LoadedModel) -> Generator:
        """For a model of :func:`mindspeed.inference.load.load_model`."""
        ranks = ModelRanks.of_megatron()
        entries = getattr(loaded.args, "vocab_size", None)
        return cls(loaded.stage, loaded.tokenizer, ranks, loaded.eos, loaded.start, entries)

    @property
    def vocab_size(self) -> int:
        """Ids that have a probability, and that may be chosen: as transformers counts them."""
        return max(self.entries or 0, self.tokenizer.vocab_size)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids; those that the tokenizer does not have are without text."""
        known = self.tokenizer.vocab_size
        return self.tokenizer.detokenize([token for token in ids if token < known])

    @property
    def context_length(self) -> int:
        """Positions the model was trained for."""
        return int(self.stage.max_sequence_length)

    def encode(self, prompt: Prompt, start: bool = True) -> list[int]:
        """Ids of a prompt; an empty one begins like every document.

        Args:
            prompt: A text, or ids, which stay as they are.
            start: Put :attr:`start` before a text; not for one that names its first tokens itself.
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
            options: How many tokens, and how they are chosen.
            batch_size: Prompts in one pass; default all. Those of similar length go together; the
                batches have no influence on what is chosen.
            share: Data-parallel copies of the model take a part of the prompts each; all ranks get
                all results. Otherwise every copy works alone, on what it is given.

        Raises:
            DataError: A prompt has ids outside the vocabulary, or is too long for the model.
        """
        rows = [self.encode(prompt) for prompt in prompts]
        check_prompts(self.stage, rows, options, self.vocab_size)  # all of them, before any runs
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        copies = self.ranks.data if share else None
        if copies is not None:
            order = order[copies.rank() :: copies.size()]
        size = batch_size or max(1, len(order))
        results: dict[int, list[Completion]] = {}
        for first in range(0, len(order), size):
            numbers = order[first : first + size]
            batch = [rows[number] for number in numbers]
            search = self._search if options.num_beams > 1 else self._sample
            results |= zip(numbers, search(batch, options, numbers), strict=True)
        if copies is not None and copies.size() > 1:
            parts: list[Any] = [None] * copies.size()
            dist.all_gather_object(parts, results, group=copies)
            results = {number: found for part in parts for number, found in part.items()}
        return [results[number] for number in range(len(rows))]

    def pieces(self, prompts: Sequence[Prompt], options: SamplingOptions) -> Iterator[Piece]:
        """Continue prompts and yield their text as it is made. No beam search: it may revise.

        Raises:
            DataError: A prompt has ids outside the vocabulary, or is too long for the model.
        """
        rows = [self.encode(prompt) for prompt in prompts]
        numbers = range(len(rows) * options.num_return_sequences)
        return self._pieces(rows, options, list(numbers))

    def ends_of(self, options: SamplingOptions) -> frozenset[int]:
        """Ids that end a text. Stop strings that are a token count: special ones have no text."""
        found = {self.tokenizer.token_id(stop) for stop in options.stop}
        return self.eos | {token for token in found if token is not None}

    def _pieces(
        self, prompts: Sequence[list[int]], options: SamplingOptions, numbers: Sequence[int]
    ) -> Iterator[Piece]:
        detokenize, copies = self.detokenize, options.num_return_sequences
        texts = [
            TextStream(detokenize, prompt, options.stop)
            for prompt in prompts
            for _ in range(copies)
        ]
        new: dict[int, str] = {}

        def ends(row: int, token: int) -> bool:
            new[row] = texts[row].push(token)
            return texts[row].stopped

        for step in steps(
            self.stage,
            prompts,
            options,
            ranks=self.ranks,
            vocab_size=self.vocab_size,
            eos=self.ends_of(options),
            ends=ends,
            numbers=numbers,
        ):
            for row in sorted(step.tokens.keys() | step.ended.keys()):
                finish = step.ended.get(row)
                text = new.pop(row, "") + (texts[row].finish() if finish else "")
                finish = "stop" if finish and texts[row].stopped else finish
                yield Piece(row, text, step.tokens.get(row), step.scores.get(row), finish)

    def _sample(
        self, prompts: Sequence[list[int]], options: SamplingOptions, numbers: Sequence[int]
    ) -> list[list[Completion]]:
        copies = options.num_return_sequences
        rows = [number * copies + copy for number in numbers for copy in range(copies)]
        found = [_Growing() for _ in rows]
        for piece in self._pieces(prompts, options, rows):
            found[piece.row].add(piece)
        done = [growing.done(options) for growing in found]
        return [done[i : i + copies] for i in range(0, len(done), copies)]

    def _search(
        self, prompts: Sequence[list[int]], options: SamplingOptions, numbers: Sequence[int]
    ) -> list[list[Completion]]:
        def text(index: int, tokens: Sequence[int]) -> str:
            stream = TextStream(self.detokenize, prompts[index], options.stop)
            return "".join(stream.push(token) for token in tokens) + stream.finish()

        def ends(index: int, tokens: Sequence[int]) -> bool:
            whole = self.detokenize(tokens)
            return cut_at_stop(whole, options.stop) != whole

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
            ranks=self.ranks,
            vocab_size=self.vocab_size,
            eos=self.ends_of(options),
            ends=ends if options.stop else None,
            numbers=numbers,
        )
        return [[completion(i, hypothesis) for hypothesis in row] for i, row in enumerate(found)]


class _Growing:
    """A completion in the making."""

    def __init__(self) -> None:
        self._completion = Completion([], "", "", [])

    def add(self, piece: Piece) -> None:
        so_far = self._completion
        if piece.token is not None:
            so_far.tokens.append(piece.token)
        if piece.scores is not None:
            so_far.scores.append(piece.scores)  # type: ignore[union-attr]
        self._completion = replace(
            so_far, text=so_far.text + piece.text, finish=piece.finish or so_far.finish
        )

    def done(self, options: SamplingOptions) -> Completion:
        return (
            replace(self._completion, scores=None) if options.logprobs is None else self._completion
        )
