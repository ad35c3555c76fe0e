"""Continue token sequences with a GPT under tensor and pipeline parallelism.

The prompt goes through the model once, then one token at a time (:mod:`.decoder`). Prompts of
different length run in one batch without padding: the batch starts at the shortest, and longer ones
are fed their own next token instead of the model's until they end.

    first stage --hidden--> ... --hidden--> last stage
         ^                                       | its first rank chooses
         +------------- token ids, broadcast ----+ over the model-parallel group

Per step ``b`` ids are broadcast: all ranks see the same ids and cannot diverge. Which rows have
ended follows from the ids alone, on every rank for itself.

Megatron's ``StaticInferenceEngine`` is not used: it sends the whole logits to every stage through a
function that insists on CUDA tensors, cannot combine top-k with top-p, maps padded vocabulary
entries to the last real token, has no beam search, and is announced to be removed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed.errors import DataError
from mindspeed.inference.decoder import Decoder
from mindspeed.inference.ranks import ModelRanks
from mindspeed.inference.sampling import SamplingOptions, choose, generator_of, process

__all__ = ["ModelRanks", "Step", "TokenScores", "check_prompts", "generate", "steps", "stream"]


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities at one place, by the model's own logits.

    Attributes:
        chosen: Of the token that was taken.
        best: The most likely tokens and theirs, as many as were asked for.
    """

    chosen: float
    best: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Step:
    """What one step brought.

    Attributes:
        tokens: Row -> its new token.
        ended: Row -> ``"stop"`` (end token or stop string) or ``"length"``.
        scores: Row -> log-probabilities of the new token, where asked for.
    """

    tokens: dict[int, int]
    ended: dict[int, str]
    scores: dict[int, TokenScores] = field(default_factory=dict)


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    ranks: ModelRanks,
    vocab_size: int,
    eod: int | Collection[int] | None = None,
) -> list[list[int]]:
    """Return the new tokens of every prompt; ``eod`` ends a sequence and is not returned."""
    output: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, options, ranks=ranks, vocab_size=vocab_size, eod=eod):
        for row, token in step.items():
            output[row].append(token)
    return output


def stream(
    model: Any,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    ranks: ModelRanks,
    vocab_size: int,
    eod: int | Collection[int] | None = None,
) -> Iterator[dict[int, int]]:
    """Yield ``{row: new token}`` after every step; the same on every rank of the model."""
    for step in steps(model, prompts, options, ranks=ranks, vocab_size=vocab_size, eos=ids(eod)):
        yield step.tokens


def ids(eod: int | Collection[int] | None) -> frozenset[int]:
    """End tokens as a set."""
    if eod is None:
        return frozenset()
    return frozenset({eod} if isinstance(eod, int) else eod)


@torch.inference_mode()
def steps(
    model: Any,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    ranks: ModelRanks,
    vocab_size: int,
    eos: Collection[int] = (),
    ends: Callable[[int, int], bool] | None = None,
    numbers: Sequence[int] | None = None,
) -> Iterator[Step]:
    """Generate greedily or by sampling, step by step; the same on every rank of the model.

    Row ``i * num_return_sequences + j`` is continuation ``j`` of prompt ``i``.

    Args:
        model: This rank's stage, a ``GPTModel`` without wrappers. It is put into evaluation mode.
        prompts: Token ids of each prompt, at least one.
        options: How many tokens, and how they are chosen.
        ranks: The ranks that hold the model.
        vocab_size: Entries of the tokenizer; the model's padded entries are never chosen.
        eos: Ids that end a sequence; they are not returned.
        ends: Called with row and new token in order, on every rank; True ends the row.
        numbers: Numbers of the rows that their draws depend on; default: as they come.

    Raises:
        DataError: A prompt is empty, or has ids outside the vocabulary, or is too long.
    """
    check_prompts(model, prompts, options, vocab_size)
    model.eval()
    copies = options.num_return_sequences
    batch = _Batch(prompts, copies, options.max_new_tokens)
    numbers = range(len(prompts) * copies) if numbers is None else numbers
    generators = [generator_of(options.seed, number) for number in numbers]
    decoder = Decoder(model, ranks, len(prompts), batch.tokens.shape[1], options.recompute)
    logits = decoder(batch.tokens[::copies, : batch.end])
    decoder.select(torch.arange(len(prompts)).repeat_interleave(copies))
    if logits is not None:
        logits = logits.repeat_interleave(copies, dim=0)
    while True:
        rows = batch.rows
        chosen, scores = _chosen(logits, batch, options, vocab_size, eos, generators, ranks)
        step = batch.append(chosen, scores, eos, ends)
        yield step
        if not batch.rows:
            return
        places = {row: place for place, row in enumerate(rows)}
        decoder.select(torch.tensor([places[row] for row in batch.rows]))
        logits = decoder(batch.tokens[batch.rows, batch.end - 1 : batch.end])


class _Batch:
    """The sequences and how far they are. The same on every rank.

    Attributes:
        tokens: All sequences, ``[rows, longest]``.
        end: Tokens per row that the model has seen or is about to see.
        rows: Rows that the model still runs.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], copies: int, new_tokens: int) -> None:
        self.lengths = [len(prompt) for prompt in prompts for _ in range(copies)]
        self.end = min(self.lengths)
        self.rows = list(range(len(self.lengths)))
        self._new_tokens = new_tokens
        self.tokens = torch.zeros(len(self.rows), max(self.lengths) + new_tokens, dtype=torch.long)
        for row in self.rows:
            prompt = prompts[row // copies]
            self.tokens[row, : len(prompt)] = torch.tensor(prompt)

    @property
    def past_prompt(self) -> list[int]:
        """Places in ``rows`` of those whose next token is the model's choice."""
        return [p for p, row in enumerate(self.rows) if self.lengths[row] <= self.end]

    def append(
        self,
        chosen: list[int],
        scores: list[TokenScores] | None,
        eos: Collection[int],
        ends: Callable[[int, int], bool] | None,
    ) -> Step:
        """Take the chosen tokens of the rows that are past their prompt."""
        step = Step({}, {})
        for place in self.past_prompt:
            row, token = self.rows[place], chosen[place]
            if token in eos:
                step.ended[row] = "stop"
                continue
            self.tokens[row, self.end] = token
            step.tokens[row] = token
            if scores is not None:
                step.scores[row] = scores[place]
            if ends is not None and ends(row, token):
                step.ended[row] = "stop"
            elif self.end + 1 == self.lengths[row] + self._new_tokens:
                step.ended[row] = "length"
        self.end += 1
        self.rows = [row for row in self.rows if row not in step.ended]
        return step


def _chosen(
    logits: torch.Tensor | None,
    batch: _Batch,
    options: SamplingOptions,
    vocab_size: int,
    eos: Collection[int],
    generators: Sequence[torch.Generator],
    ranks: ModelRanks,
) -> tuple[list[int], list[TokenScores] | None]:
    """The next token of every running row, on every rank, and its log-probability if asked for."""
    chosen = torch.zeros(len(batch.rows), dtype=torch.long)
    places = batch.past_prompt  # the others draw nothing: a batch does not change its rows
    if logits is not None and ranks.chooses and places:
        raw = logits[:, :vocab_size].float()
        rows = [batch.rows[place] for place in places]
        new_tokens = [batch.end - batch.lengths[row] for row in rows]
        scores = process(raw[places], batch.tokens[rows, : batch.end], options, eos, new_tokens)
        chosen[places] = choose(scores, options, [generators[row] for row in rows])
    chosen = ranks.broadcast(chosen)
    if options.logprobs is None:
        return chosen.tolist(), None
    table = torch.zeros(len(batch.rows), 1 + 2 * options.logprobs)
    if logits is not None and ranks.chooses:
        table = table_of(logits[:, :vocab_size].float(), chosen, options.logprobs)
    return chosen.tolist(), [scores_of(line) for line in ranks.broadcast(table).tolist()]


def table_of(logits: torch.Tensor, chosen: torch.Tensor, best: int) -> torch.Tensor:
    """``[b, 1 + 2 * best]``: log-probability of ``chosen``, those of the best, the best's ids.

    Ids stay exact as fp32 numbers: vocabularies are smaller than 2^24.
    """
    logprobs = logits.log_softmax(-1).cpu()
    values, tokens = logprobs.topk(min(best, logprobs.shape[1]))
    return torch.cat((logprobs.gather(1, chosen[:, None]), values, tokens.float()), dim=1)


def scores_of(line: Sequence[float]) -> TokenScores:
    """A line of :func:`table_of`."""
    best = (len(line) - 1) // 2
    values, tokens = line[1 : 1 + best], line[1 + best :]
    return TokenScores(line[0], tuple(zip(map(int, tokens), values, strict=True)))


def check_prompts(
    model: Any, prompts: Sequence[Sequence[int]], options: SamplingOptions, vocab_size: int
) -> None:
    """Refuse what cannot be continued; the same on every rank, before anything runs."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise DataError("every prompt needs at least one token")
    if any(not 0 <= token < vocab_size for prompt in prompts for token in prompt):
        raise DataError(f"a prompt has token ids outside the vocabulary of {vocab_size:,} entries")
    if options.logprobs is not None and options.logprobs > vocab_size:
        raise DataError(f"--logprobs {options.logprobs}: the vocabulary has {vocab_size:,} entries")
    longest = max(map(len, prompts)) + options.max_new_tokens
    limit, kind = model.max_sequence_length, model.position_embedding_type
    if longest <= limit:
        return
    if kind == "learned_absolute":
        raise DataError(
            f"prompt and new tokens are {longest:,} tokens long, the model has {limit:,} learned "
            "positions; shorten the prompt or lower --max-new-tokens"
        )
    if kind == "rope":
        warnings.warn(
            f"prompt and new tokens may become {longest:,} tokens long, the model was trained for "
            f"{limit:,} positions: what it says beyond them may be worthless",
            stacklevel=2,
        )
