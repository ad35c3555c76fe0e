"""How likely a model finds given continuations, exactly, under tensor and pipeline parallelism.

    context  c0 c1 c2   continuation  t0 t1
    input    c0 c1 c2 t0 [padding]
    scored         t0 t1                    log p(t0 | c0 c1 c2) + log p(t1 | c0 c1 c2 t0)

Rows are padded on the right: attention looks to the left only, so a padded row scores what it
scores alone. Pairs with the same input share one row; the four letters of a multiple-choice
question, one token each, cost one row of the batch and not four.

The vocabulary stays split over the tensor-parallel ranks. Per scored token three numbers (largest
logit, its index, sum of exponentials) and the target's logit are reduced over them, and the last
stage broadcasts 2 numbers per pair to all ranks of the model; the logits themselves never travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.errors import DataError
from mindspeed.inference.ranks import ModelRanks

Pair = tuple[Sequence[int], Sequence[int]]
Score = tuple[float, bool]

_BEYOND_ANY_VOCABULARY = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class _Span:
    """What one pair asks of a row: ``targets`` follow the positions from ``start`` on."""

    pair: int
    start: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class _Row:
    tokens: tuple[int, ...]
    spans: list[_Span]


@torch.inference_mode()
def loglikelihood(
    model: Any,
    pairs: Sequence[Pair],
    *,
    ranks: ModelRanks,
    vocab_size: int,
    tokens_per_batch: int = 4096,
    progress: Callable[[dict[int, Score]], object] | None = None,
) -> list[Score]:
    """Log-probability of every continuation after its context; the same on every rank.

    Args:
        model: This rank's stage, a ``GPTModel`` without wrappers. It is put into evaluation mode.
        pairs: Token ids of context and continuation, both at least one long.
        ranks: The ranks that hold the model.
        vocab_size: Entries of the tokenizer; the model's padded entries have no probability.
        tokens_per_batch: Upper limit of rows times length of one pass; a longer row goes alone.
        progress: Called with the scores that a pass has found, by the place of their pair.

    Returns:
        Per pair the sum of the natural logarithms, and whether every token of the continuation is
        the most likely one (the first of equals).

    Raises:
        DataError: A pair is empty, has ids outside the vocabulary, or is too long for the model.
    """
    _check(model, pairs, vocab_size)
    model.eval()
    results: list[Score] = [(0.0, False)] * len(pairs)
    for batch in _batches(_rows(pairs), tokens_per_batch):
        spans = [span for row in batch for span in row.spans]
        scores = _score(model, batch, ranks, vocab_size)
        found = {
            span.pair: (logprob, bool(greedy))
            for span, (logprob, greedy) in zip(spans, scores, strict=True)
        }
        for pair, score in found.items():
            results[pair] = score
        if progress is not None:
            progress(found)
    return results


def _rows(pairs: Sequence[Pair]) -> list[_Row]:
    """Different inputs, longest first, so that what does not fit in memory fails at once."""
    rows: dict[tuple[int, ...], _Row] = {}
    for index, (context, continuation) in enumerate(pairs):
        tokens = (*context, *continuation)[:-1]
        span = _Span(index, len(context) - 1, tuple(continuation))
        rows.setdefault(tokens, _Row(tokens, [])).spans.append(span)
    return sorted(rows.values(), key=lambda row: -len(row.tokens))


def _batches(rows: Sequence[_Row], tokens_per_batch: int) -> Iterator[list[_Row]]:
    start = 0
    while start < len(rows):
        size = max(1, tokens_per_batch // len(rows[start].tokens))
        yield list(rows[start : start + size])
        start += size


def _score(
    model: Any, batch: Sequence[_Row], ranks: ModelRanks, vocab_size: int
) -> list[list[float]]:
    """``[log-probability, 1 or 0]`` of every span of the batch, on every rank of the model."""
    spans = [(row, span) for row, item in enumerate(batch) for span in item.spans]
    scores = torch.zeros(len(spans), 2, dtype=torch.float64)
    logits = _forward(model, _padded(batch), ranks)
    if logits is not None:
        place = logits.device
        lengths = torch.tensor([len(span.targets) for _, span in spans], device=place)
        where = [(row, span.start + i) for row, span in spans for i in range(len(span.targets))]
        targets = torch.tensor([t for _, span in spans for t in span.targets], device=place)
        rows, positions = torch.tensor(where, device=place).unbind(1)
        group = model.pg_collection.tp
        logprobs, best = _token_scores(logits[rows, positions], targets, vocab_size, group)
        owner = torch.arange(len(spans), device=place).repeat_interleave(lengths)
        sums = torch.zeros(len(spans), dtype=torch.float32, device=place)
        sums.index_add_(0, owner, logprobs)
        hits = torch.zeros(len(spans), dtype=torch.int64, device=place)
        hits.index_add_(0, owner, best.long())
        scores = torch.stack((sums.cpu().double(), (hits == lengths).cpu().double()), dim=1)
    if ranks.model.size() > 1:
        shared = scores.float().to(device.current().torch_device())
        dist.broadcast(shared, src=ranks.chooser, group=ranks.model)
        scores = shared.cpu()
    return scores.tolist()


def _token_scores(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and whether it is the first of the most likely tokens.

    Args:
        logits: This rank's columns of the vocabulary, ``[n, v / tp]``.
        targets: Ids ``[n]``.
        vocab_size: Columns from here on are padding.
        group: The tensor-parallel ranks.
    """
    logits = logits.float()
    first = group.rank() * logits.shape[1]
    columns = torch.arange(first, first + logits.shape[1], device=logits.device)
    logits = logits.masked_fill(columns >= vocab_size, float("-inf"))

    best, best_column = logits.max(dim=1)
    here = (targets >= first) & (targets < first + logits.shape[1])
    local = (targets - first).clamp(0, logits.shape[1] - 1)
    target = logits.gather(1, local[:, None])[:, 0].masked_fill(~here, float("-inf"))

    largest = best.clone()
    if group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(target, dist.ReduceOp.MAX, group=group)
    total = (logits - largest[:, None]).exp().sum(dim=1)
    winner = (best_column + first).masked_fill(best < largest, _BEYOND_ANY_VOCABULARY)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
        dist.all_reduce(winner, dist.ReduceOp.MIN, group=group)
    return target - largest - total.log(), winner == targets


def _padded(batch: Sequence[_Row]) -> torch.Tensor:
    longest = max(len(row.tokens) for row in batch)
    return torch.tensor([[*row.tokens, *[0] * (longest - len(row.tokens))] for row in batch])


def _forward(model: Any, tokens: torch.Tensor, ranks: ModelRanks) -> torch.Tensor | None:
    """One pass of ``tokens`` ``[b, s]`` without a cache; ``[b, s, v / tp]`` on the last stage."""
    place = device.current().torch_device()
    batch, length = tokens.shape

    def stage() -> torch.Tensor:
        return model(  # type: ignore[no-any-return]
            tokens.to(place),
            torch.arange(length, device=place).expand(batch, -1),
            torch.ones(1, 1, length, length, dtype=torch.bool, device=place).triu(1),
            runtime_gather_output=False,
        )

    return ranks.run_stage(model, batch, length, stage)


def _check(model: Any, pairs: Sequence[Pair], vocab_size: int) -> None:
    limit = model.max_sequence_length
    learned = model.position_embedding_type == "learned_absolute"
    for context, continuation in pairs:
        if not len(context) or not len(continuation):
            raise DataError("context and continuation need at least one token each")
        if not all(0 <= token < vocab_size for part in (context, continuation) for token in part):
            raise DataError(f"a pair has ids outside the vocabulary of {vocab_size:,} entries")
        length = len(context) + len(continuation) - 1
        if learned and length > limit:
            raise DataError(
                f"context and continuation are {length:,} tokens long, the model has {limit:,} "
                "learned positions; shorten the context"
            )
