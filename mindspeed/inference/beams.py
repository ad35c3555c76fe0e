"""Beam search and beam sampling.

Each prompt follows ``num_beams`` sequences. One step looks at all their continuations, takes the
``candidates`` best (beam sampling: draws as many, without replacement), lets those that end among
the first ``num_beams`` compete for the finished list by log-probability / length ** penalty, and
goes on with the ``num_beams`` best of the others. The search of a prompt is over when the list is
full and the best running beam, scored at its present length, is worse than the worst of the list.
These are Hugging Face's rules; the results are compared with its ``generate`` token by token.

One rank sees the logits and keeps the beams. Per step it broadcasts tokens and parents, 2 numbers
per beam, and the finished lists once in the end. The caches follow the parents on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mindspeed.inference.decoder import Decoder
from mindspeed.inference.generate import check_prompts
from mindspeed.inference.ranks import ModelRanks
from mindspeed.inference.sampling import SamplingOptions, generator_of, keep_likely, process

# As low as no real sequence scores; finite, so that sums and quotients stay numbers.
_DEAD = -1.0e9


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence.

    Attributes:
        tokens: New tokens, without the one that ended it.
        score: Log-probability (as filtered) / length ** penalty; the end token counts.
        logprobs: Of each token by the model's own logits.
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
    """The beams of one prompt. Knows nothing of models and ranks.

    Args:
        options: Number of beams, penalties, limits.
        eos: Ids that end a sequence.
        ends: Whether new tokens end a sequence otherwise (stop strings).
        generator: Of the draws of beam sampling.
    """

    def __init__(
        self,
        options: SamplingOptions,
        eos: Collection[int] = (),
        ends: Callable[[Sequence[int]], bool] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._options, self._eos, self._ends = options, frozenset(eos), ends
        self._generator = generator
        dead = [_Beam((), (), _DEAD)] * (options.num_beams - 1)
        self.beams = [_Beam((), (), 0.0), *dead]
        self.finished: list[Hypothesis] = []
        self.done = False

    def advance(self, scores: torch.Tensor, logprobs: torch.Tensor) -> tuple[list[int], list[int]]:
        """One step.

        Args:
            scores: ``[num_beams, v]``: log-probabilities that beams compete by, on the CPU.
            logprobs: The same without any processing, for the report.

        Returns:
            The new token of every beam, and which beam it continues.
        """
        options, size = self._options, self._options.num_beams
        length = len(self.beams[0].tokens) + 1
        total = (scores + torch.tensor([beam.score for beam in self.beams])[:, None]).flatten()
        count = min(size * max(2, 1 + len(self._eos)), len(total))
        keys = total if options.greedy else total + self._gumbel(len(total))
        places = keys.topk(count).indices
        running: list[tuple[_Beam, int]] = []
        ended = 0
        for rank, (place, score) in enumerate(
            zip(places.tolist(), total[places].tolist(), strict=True)
        ):
            parent, token = divmod(place, scores.shape[1])
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
        """Noise that makes the largest sums a draw without replacement."""
        exponential = torch.empty(count).exponential_(generator=self._generator)
        return -exponential.log()

    def _finish(self, tokens: tuple[int, ...]) -> str | None:
        if tokens[-1] in self._eos or (self._ends is not None and self._ends(tokens)):
            return "stop"
        return "length" if len(tokens) == self._options.max_new_tokens else None

    def _add(self, beam: _Beam, finish: str) -> None:
        score = beam.score / len(beam.tokens) ** self._options.length_penalty
        end = len(beam.tokens) - (beam.tokens[-1] in self._eos)
        found = Hypothesis(beam.tokens[:end], score, beam.logprobs[:end], finish)
        self.finished.append(found)
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
    ranks: ModelRanks,
    vocab_size: int,
    eos: Collection[int] = (),
    ends: Callable[[int, Sequence[int]], bool] | None = None,
    numbers: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """The ``num_return_sequences`` best continuations of every prompt, best first.

    Without ``greedy`` beams are sampled: ``temperature``, ``top_k`` and ``top_p`` apply, in plain
    beam search only the filters do.

    Args:
        model: This rank's stage, a ``GPTModel`` without wrappers. It is put into evaluation mode.
        prompts: Token ids of each prompt, at least one.
        options: How many tokens, and how they are chosen.
        ranks: The ranks that hold the model.
        vocab_size: Entries of the tokenizer; the model's padded entries are never chosen.
        eos: Ids that end a sequence; they are not returned.
        ends: Called with a prompt's index and new tokens, on one rank; True ends the sequence.
        numbers: Numbers of the prompts that their draws depend on; default: as they come.

    Raises:
        DataError: A prompt is empty, or has ids outside the vocabulary, or is too long.
    """
    check_prompts(model, prompts, options, vocab_size)
    model.eval()
    size = options.num_beams
    searches = [
        BeamSearch(
            options,
            eos,
            None if ends is None else partial(ends, index),
            generator_of(options.seed, number),
        )
        for index, number in enumerate(numbers or range(len(prompts)))
    ]
    lengths = [len(prompt) for prompt in prompts]
    active, end = list(range(len(prompts))), min(lengths)
    decoder = Decoder(model, ranks, len(prompts), _longest(lengths, options), options.recompute)
    logits = decoder(torch.tensor([list(prompt[:end]) for prompt in prompts]))
    decoder.select(torch.arange(len(prompts)).repeat_interleave(size))
    if logits is not None:
        logits = logits.repeat_interleave(size, dim=0)
    while True:
        plan = torch.zeros(len(active), 1 + 2 * size, dtype=torch.long)
        if logits is not None and ranks.chooses:
            groups = logits[:, :vocab_size].float().split(size)
            for place, (index, group) in enumerate(zip(active, groups, strict=True)):
                plan[place] = _advance(searches[index], prompts[index], end, group, options, eos)
        plan = ranks.broadcast(plan)
        going = [place for place in range(len(active)) if not plan[place, 0]]
        if not going:
            break
        parents = torch.cat([plan[place, 1 : 1 + size] + place * size for place in going])
        tokens = torch.cat([plan[place, 1 + size :] for place in going])
        active, end = [active[place] for place in going], end + 1
        decoder.select(parents)
        logits = decoder(tokens[:, None])
    best = [search.finished[: options.num_return_sequences] for search in searches]
    return ranks.broadcast_object(best)


def _longest(lengths: Sequence[int], options: SamplingOptions) -> int:
    return max(lengths) + options.max_new_tokens


def _advance(
    search: BeamSearch,
    prompt: Sequence[int],
    end: int,
    logits: torch.Tensor,
    options: SamplingOptions,
    eos: Collection[int],
) -> torch.Tensor:
    """``[done, parents, tokens]`` of one prompt whose sequences are ``end`` tokens long."""
    size = options.num_beams
    if end < len(prompt):  # still inside the prompt: feed its own next token
        return torch.tensor([0, *range(size), *[prompt[end]] * size])
    logprobs = logits.log_softmax(-1)
    history = torch.tensor([[*prompt, *beam.tokens] for beam in search.beams])
    scores = process(logprobs, history, options, eos, [end - len(prompt)] * size)
    if not options.greedy:
        scores = scores / options.temperature
    scores = keep_likely(scores, options, at_least=2)
    tokens, parents = search.advance(scores.cpu(), logprobs.cpu())
    return torch.tensor([int(search.done), *parents, *tokens])
