"""Beam search and beam sampling.

Each prompt has ``num_beams`` running sequences. A step scores all their continuations and selects
the best candidates (beam sampling: draws the same number without replacement). Candidates that end
and rank among the first ``num_beams`` enter the list of finished hypotheses, ordered by
log-probability / length ** penalty; the best ``num_beams`` others are the new beams. The search
ends when the list is full and the best running beam, scored at its current length, is worse than
the worst in the list. These are Hugging Face's rules; tests compare with its ``generate`` token by
token.

The sampling rank has the logits and keeps the beams. Communication: it broadcasts token and parent
of every beam per step, and the hypotheses at the end. Every rank reorders its KV cache by parents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mindspeed.inference.decoder import Decoder
from mindspeed.inference.generate import check_prompts
from mindspeed.inference.parallel_groups import ModelParallelGroups
from mindspeed.inference.sampling import (
    SamplingOptions,
    filter_scores,
    generator_of,
    process_logits,
)

# Below the score of any real sequence, but finite, so that sums and quotients are not NaN.
_DEAD = -1.0e9


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence.

    Attributes:
        tokens: New token ids, without the end token.
        score: Log-probability (after processing) / length ** penalty, end token included.
        logprobs: Log-probability of each token from the unprocessed logits.
        finish: ``"stop"`` or ``"length"``.
    """

    tokens: tuple[int, ...]
    score: float
    logprobs: tuple[float, ...]
    finish: str


@dataclass(frozen=True)
class _Beam:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float


class BeamSearch:
    """The beams of one prompt. Independent of models and process groups.

    Args:
        options: Number of beams, penalties, limits.
        eos: Ids that end a sequence.
        should_stop: Called with the new tokens; True ends the sequence (stop strings).
        generator: Random generator of beam sampling.
    """

    def __init__(
        self,
        options: SamplingOptions,
        eos: Collection[int] = (),
        should_stop: Callable[[Sequence[int]], bool] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._options, self._eos, self._should_stop = options, frozenset(eos), should_stop
        self._generator = generator
        dead = [_Beam((), (), _DEAD)] * (options.num_beams - 1)
        self.beams = [_Beam((), (), 0.0), *dead]
        self.finished: list[Hypothesis] = []
        self.done = False

    def advance(self, scores: torch.Tensor, logprobs: torch.Tensor) -> tuple[list[int], list[int]]:
        """One step.

        Args:
            scores: fp32 ``[num_beams, v]`` on the CPU: processed log-probabilities, which rank
                the candidates.
            logprobs: fp32 ``[num_beams, v]``: unprocessed log-probabilities, which are reported.

        Returns:
            The new token of every beam, and the beam that it continues (its parent).
        """
        options, size = self._options, self._options.num_beams
        length = len(self.beams[0].tokens) + 1
        total = (scores + torch.tensor([beam.score for beam in self.beams])[:, None]).flatten()
        count = min(size * max(2, 1 + len(self._eos)), len(total))
        keys = total if options.greedy else total + self._gumbel(len(total))
        candidates = keys.topk(count).indices
        running: list[tuple[_Beam, int]] = []
        ended = 0
        for rank, (candidate, score) in enumerate(
            zip(candidates.tolist(), total[candidates].tolist(), strict=True)
        ):
            parent, token = divmod(candidate, scores.shape[1])
            before = self.beams[parent]
            beam = _Beam(
                (*before.tokens, token),
                (*before.logprobs, float(logprobs[parent, token])),
                score,
            )
            finish = self._finish(beam.tokens)
            if finish is None:
                running.append((beam, parent))
                continue
            ended += 1
            if rank < size:
                self._add(beam, finish)
        running.sort(key=lambda entry: -entry[0].score)
        self.done = ended == count or not self._can_improve(running[0][0].score, length)
        if not running:
            return [0] * size, list(range(size))
        beam, parent = running[0]
        running = (running + [(replace(beam, score=_DEAD), parent)] * size)[:size]
        self.beams = [beam for beam, _ in running]
        return [beam.tokens[-1] for beam in self.beams], [parent for _, parent in running]

    def _gumbel(self, count: int) -> torch.Tensor:
        """Gumbel noise: the top k of scores plus noise are k draws without replacement."""
        exponential = torch.empty(count).exponential_(generator=self._generator)
        return -exponential.log()

    def _finish(self, tokens: tuple[int, ...]) -> str | None:
        if tokens[-1] in self._eos or (self._should_stop is not None and self._should_stop(tokens)):
            return "stop"
        return "length" if len(tokens) == self._options.max_new_tokens else None

    def _add(self, beam: _Beam, finish: str) -> None:
        score = beam.score / len(beam.tokens) ** self._options.length_penalty
        end = len(beam.tokens) - (beam.tokens[-1] in self._eos)
        hypothesis = Hypothesis(beam.tokens[:end], score, beam.logprobs[:end], finish)
        self.finished.append(hypothesis)
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self._options.num_beams :]

    def _can_improve(self, best_running: float, length: int) -> bool:
        if len(self.finished) < self._options.num_beams:
            return True
        if self._options.early_stopping:
            return False
        return best_running / length**self._options.length_penalty > self.finished[-1].score


@torch.inference_mode()
def beam_search(
    model: Any,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    groups: ModelParallelGroups,
    vocab_size: int,
    eos: Collection[int] = (),
    should_stop: Callable[[int, Sequence[int]], bool] | None = None,
    seed_offsets: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """The ``num_return_sequences`` best continuations of every prompt, best first.

    With ``greedy`` it is plain beam search, in which only ``top_k`` and ``top_p`` apply; without,
    beams are sampled and ``temperature`` applies as well.

    Args:
        model: This rank's stage, a ``GPTModel`` without wrappers. It is put into evaluation mode.
        prompts: Token ids of each prompt, at least one.
        options: Sampling options and limits.
        groups: Process groups of the model.
        vocab_size: Entries of the tokenizer; the model's padded entries are never sampled.
        eos: Ids that end a sequence; they are not returned.
        should_stop: Called on the sampling rank with a prompt's index and its new tokens; True ends
            the sequence.
        seed_offsets: Added to ``options.seed`` for each prompt; default: its index.

    Raises:
        DataError: A prompt is empty, has ids outside the vocabulary, or is too long.
    """
    check_prompts(model, prompts, options, vocab_size)
    model.eval()
    size = options.num_beams
    searches = [
        BeamSearch(
            options,
            eos,
            None if should_stop is None else partial(should_stop, index),
            generator_of(options.seed, offset),
        )
        for index, offset in enumerate(seed_offsets or range(len(prompts)))
    ]
    lengths = [len(prompt) for prompt in prompts]
    running, length = list(range(len(prompts))), min(lengths)
    max_length = max(lengths) + options.max_new_tokens
    decoder = Decoder(model, groups, len(prompts), max_length, options.recompute)
    logits = decoder(torch.tensor([list(prompt[:length]) for prompt in prompts]))
    decoder.select(torch.arange(len(prompts)).repeat_interleave(size))
    if logits is not None:
        logits = logits.repeat_interleave(size, dim=0)
    while True:
        moves = torch.zeros(len(running), 1 + 2 * size, dtype=torch.long)  # see _advance
        if logits is not None and groups.is_sampling_rank:
            beam_logits = logits[:, :vocab_size].float().split(size)
            for i, (index, own) in enumerate(zip(running, beam_logits, strict=True)):
                moves[i] = _advance(searches[index], prompts[index], length, own, options, eos)
        moves = groups.broadcast(moves)
        unfinished = [i for i in range(len(running)) if not moves[i, 0]]
        if not unfinished:
            break
        parents = torch.cat([moves[i, 1 : 1 + size] + i * size for i in unfinished])
        tokens = torch.cat([moves[i, 1 + size :] for i in unfinished])
        running, length = [running[i] for i in unfinished], length + 1
        decoder.select(parents)
        logits = decoder(tokens[:, None])
    best = [search.finished[: options.num_return_sequences] for search in searches]
    return groups.broadcast_object(best)


def _advance(
    search: BeamSearch,
    prompt: Sequence[int],
    length: int,
    logits: torch.Tensor,
    options: SamplingOptions,
    eos: Collection[int],
) -> torch.Tensor:
    """One step of one prompt, whose sequences have ``length`` tokens.

    Args:
        search: State of the search.
        prompt: Token ids.
        length: Tokens per sequence so far.
        logits: fp32 ``[num_beams, v]``.
        eos: Ids that end a sequence.

    Returns:
        int64 ``[1 + 2 * num_beams]``: whether the search is done, parents, tokens.
    """
    size = options.num_beams
    if length < len(prompt):  # inside the prompt: feed its own next token
        return torch.tensor([0, *range(size), *[prompt[length]] * size])
    logprobs = logits.log_softmax(-1)
    history = torch.tensor([[*prompt, *beam.tokens] for beam in search.beams])
    scores = process_logits(logprobs, history, options, eos, [length - len(prompt)] * size)
    if not options.greedy:
        scores = scores / options.temperature
    scores = filter_scores(scores, options, at_least=2)
    tokens, parents = search.advance(scores.cpu(), logprobs.cpu())
    return torch.tensor([int(search.done), *parents, *tokens])
