"""Requests that are answered together: each may join and leave at any token.

    turn 1   A prompt      A A A            first tokens of A's rows
    turn 2   B prompt      A A A B          B has joined: one pass for all rows
    turn 3                 A A   B          a row of A has ended

A turn reads at most one new prompt, chooses a token for every row, and takes all rows through the
model in one pass (:mod:`.rows`). So nobody waits for another's end, and every row gets one token a
turn, chosen by its own request's options with its own generator: a request gets the tokens that it
gets alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from mindspeed import device
from mindspeed.inference.decoder import Decoder
from mindspeed.inference.generate import TokenScores, check_prompts, scores_of, table_of
from mindspeed.inference.generator import Generator, Piece
from mindspeed.inference.rows import Rows, attention_by_rows
from mindspeed.inference.sampling import SamplingOptions, choose, generator_of, process
from mindspeed.inference.text import TextStream


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a prompt's own tokens.

    Attributes:
        row: As in :class:`~.generator.Piece`; one for each continuation.
        tokens: Ids of the prompt.
        scores: Of every token but the first, which follows nothing.
    """

    row: int
    tokens: tuple[int, ...]
    scores: tuple[TokenScores, ...]


@dataclass
class _Row:
    """A continuation in the making."""

    number: int
    tokens: list[int]
    prompt_length: int
    text: TextStream
    draws: torch.Generator
    decoder: Decoder
    logits: torch.Tensor | None  # [v] behind the last token, on the last stage


@dataclass
class _Request:
    options: SamplingOptions
    eos: frozenset[int]
    rows: list[_Row] = field(default_factory=list)


class Together:
    """A model and the requests that it answers at the moment. Every method is collective.

    Args:
        generator: The model.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator, self._ranks = generator, generator.ranks
        self._requests: dict[Hashable, _Request] = {}

    @property
    def rows(self) -> int:
        """Continuations that are not at their end."""
        return sum(len(request.rows) for request in self._requests.values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._requests

    @torch.inference_mode()
    def join(
        self,
        key: Hashable,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        prompt_scores: bool = False,
    ) -> list[PromptScores]:
        """Take in a request: its prompts go through the model.

        Args:
            key: Of the request, new.
            prompts: Token ids.
            options: How it goes on; no beams.
            prompt_scores: Also score the tokens of the prompts, with ``options.logprobs``.

        Raises:
            DataError: A prompt is empty, or has ids outside the vocabulary, or is too long.
        """
        generator = self._generator
        check_prompts(generator.stage, prompts, options, generator.vocab_size)
        generator.stage.eval()
        request = _Request(options, generator.ends_of(options))
        found: list[PromptScores] = []
        for index, prompt in enumerate(prompts):
            decoder, logits, scores = self._read(prompt, options, prompt_scores)
            for copy in range(options.num_return_sequences):
                number = index * options.num_return_sequences + copy
                if prompt_scores:
                    found.append(PromptScores(number, tuple(prompt), scores))
                request.rows.append(
                    _Row(
                        number,
                        list(prompt),
                        len(prompt),
                        TextStream(generator.detokenize, prompt, options.stop),
                        generator_of(options.seed, number),
                        decoder if copy == 0 else decoder.copy(),
                        logits,
                    )
                )
        self._requests[key] = request
        return found

    def leave(self, key: Hashable) -> None:
        """Forget a request; nothing happens where it has ended."""
        self._requests.pop(key, None)

    @torch.inference_mode()
    def turn(self) -> Iterator[tuple[Hashable, Piece]]:
        """A token for every row, and the pass for the ones behind; what each row gets."""
        for key, request in list(self._requests.items()):
            for piece in self._choose(request):
                yield key, piece
            if not request.rows:
                del self._requests[key]
        rows = [row for request in self._requests.values() for row in request.rows]
        if rows:
            self._pass(rows)

    def _read(
        self, prompt: Sequence[int], options: SamplingOptions, prompt_scores: bool
    ) -> tuple[Decoder, torch.Tensor | None, tuple[TokenScores, ...]]:
        """A prompt's cache, the logits behind it, and its scores."""
        room = len(prompt) + options.max_new_tokens
        decoder = Decoder(self._generator.stage, self._ranks, 1, room)
        tokens = torch.tensor([list(prompt)])
        if not prompt_scores:
            logits = decoder(tokens)
            return decoder, None if logits is None else logits[0], ()
        every = decoder.everywhere(tokens)
        best = options.logprobs or 0
        table = torch.zeros(len(prompt) - 1, 1 + 2 * best)
        if every is not None and self._ranks.chooses:
            before = every[0, :-1, : self._generator.vocab_size].float()
            table = table_of(before, tokens[0, 1:], best)
        scores = tuple(scores_of(line) for line in self._ranks.broadcast(table).tolist())
        return decoder, None if every is None else every[0, -1], scores

    def _choose(self, request: _Request) -> Iterator[Piece]:
        """A token for each of the request's rows."""
        rows, options, vocab_size = request.rows, request.options, self._generator.vocab_size
        chosen = torch.zeros(len(rows), dtype=torch.long)
        best = options.logprobs
        table = torch.zeros(len(rows), 1 + 2 * (best or 0))
        if self._ranks.chooses:
            raw = torch.stack([row.logits[:vocab_size].float() for row in rows])  # type: ignore[index]
            for place, row in enumerate(rows):
                new = [len(row.tokens) - row.prompt_length]
                so_far = torch.tensor([row.tokens])
                scores = process(raw[place : place + 1], so_far, options, request.eos, new)
                chosen[place] = choose(scores, options, [row.draws])[0]
            if best is not None:
                table = table_of(raw, chosen, best)
        tokens = self._ranks.broadcast(chosen).tolist()
        found: list[TokenScores | None] = [None] * len(rows)
        if best is not None:
            found = [scores_of(line) for line in self._ranks.broadcast(table).tolist()]
        pieces = [
            self._piece(request, row, token, scores)
            for row, token, scores in zip(rows, tokens, found, strict=True)
        ]
        request.rows = [row for row, p in zip(rows, pieces, strict=True) if p.finish is None]
        yield from pieces

    def _piece(self, request: _Request, row: _Row, token: int, scores: TokenScores | None) -> Piece:
        if token in request.eos:
            end = None if scores is None else token
            return Piece(row.number, row.text.finish(), None, scores, "stop", end)
        row.tokens.append(token)
        text, finish = row.text.push(token), None
        if row.text.stopped:
            finish = "stop"
        elif len(row.tokens) - row.prompt_length == request.options.max_new_tokens:
            finish = "length"
        if finish is not None:
            text += row.text.finish()
            finish = "stop" if row.text.stopped else finish
        return Piece(row.number, text, token, scores, finish)

    def _pass(self, rows: Sequence[_Row]) -> None:
        """All rows' last tokens through the model."""
        model, place = self._generator.stage, device.current().torch_device()
        context = Rows([row.decoder.context for row in rows])
        last = torch.tensor([[row.tokens[-1]] for row in rows])

        def stage() -> torch.Tensor:
            with attention_by_rows(model):
                return model(  # type: ignore[no-any-return]
                    last.to(place),
                    context.positions().to(place),
                    None,
                    inference_context=context,
                    runtime_gather_output=True,
                )

        output = self._ranks.run_stage(model, len(rows), 1, stage)
        context.advance()
        for number, row in enumerate(rows):
            row.logits = None if output is None else output[number, -1]
