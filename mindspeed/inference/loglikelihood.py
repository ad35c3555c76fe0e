"""Exact log-likelihood of given continuations, under tensor and pipeline parallelism.

    context  c0 c1 c2   continuation  t0 t1
    input    c0 c1 c2 t0 [padding]
    scored         t0 t1                    log p(t0 | c0 c1 c2) + log p(t1 | c0 c1 c2 t0)

Inputs are padded on the right; attention is causal, so padding does not change the scores. Pairs
with the same input share one sequence: the four letters of a multiple-choice question, one token
each, cost one sequence of the batch and not four.

The vocabulary stays sharded over the tensor-parallel ranks. Communication: four all-reduces of one
number per scored token (largest logit, its index, sum of exponentials, the target's logit), and a
broadcast of 2 numbers per pair from the last stage. The logits themselves are never communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.errors import DataError
from mindspeed.inference.parallel_groups import ModelParallelGroups

Pair = tuple[Sequence[int], Sequence[int]]
Score = tuple[float, bool]

_INVALID_ID = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class _Span:
    """Scored tokens of one pair: ``targets`` are predicted at the positions from ``start`` on."""

    pair: int
    start: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class _Input:
    """One input sequence and the pairs that it scores."""

    tokens: tuple[int, ...]
    spans: list[_Span]


@torch.inference_mode()
def loglikelihood(
    model: Any,
    pairs: Sequence[Pair],
    *,
    groups: ModelParallelGroups,
    vocab_size: int,
    tokens_per_batch: int = 4096,
    progress: Callable[[dict[int, Score]], object] | None = None,
) -> list[Score]:
    """Log-probability of every continuation given its context; the same on every rank.

    Args:
        model: This rank's stage, a ``GPTModel`` without wrappers. It is put into evaluation mode.
        pairs: Token ids of context and continuation, both at least one token.
        groups: Process groups of the model.
        vocab_size: Entries of the tokenizer; the model's padded entries have no probability.
        tokens_per_batch: Maximum of sequences times length per pass; a longer sequence runs alone.
        progress: Called after each pass with its scores, keyed by the index of their pair.

    Returns:
        Per pair the sum of the log-probabilities (natural logarithm), and whether every token of
        the continuation is the argmax (the lowest id on ties).

    Raises:
        DataError: A pair is empty, has ids outside the vocabulary, or is too long for the model.
    """
    _check(model, pairs, vocab_size)
    model.eval()
    results: list[Score] = [(0.0, False)] * len(pairs)
    for batch in _batches(_inputs(pairs), tokens_per_batch):
        spans = [span for item in batch for span in item.spans]
        scores = _score(model, batch, groups, vocab_size)
        found = {
            span.pair: (logprob, bool(greedy))
            for span, (logprob, greedy) in zip(spans, scores, strict=True)
        }
        for pair, score in found.items():
            results[pair] = score
        if progress is not None:
            progress(found)
    return results


def _inputs(pairs: Sequence[Pair]) -> list[_Input]:
    """Distinct inputs, longest first, so that out-of-memory errors occur at once."""
    inputs: dict[tuple[int, ...], _Input] = {}
    for index, (context, continuation) in enumerate(pairs):
        tokens = (*context, *continuation)[:-1]
        span = _Span(index, len(context) - 1, tuple(continuation))
        inputs.setdefault(tokens, _Input(tokens, [])).spans.append(span)
    return sorted(inputs.values(), key=lambda item: -len(item.tokens))


def _batches(inputs: Sequence[_Input], tokens_per_batch: int) -> Iterator[list[_Input]]:
    start = 0
    while start < len(inputs):
        size = max(1, tokens_per_batch // len(inputs[start].tokens))
        yield list(inputs[start : start + size])
        start += size


def _score(
    model: Any, batch: Sequence[_Input], groups: ModelParallelGroups, vocab_size: int
) -> list[list[float]]:
    """``[log-probability, is greedy (0 or 1)]`` of every span of the batch, on every rank."""
    spans = [(row, span) for row, item in enumerate(batch) for span in item.spans]
    scores = torch.zeros(len(spans), 2, dtype=torch.float64)
    logits = _forward(model, _pad(batch), groups)
    if logits is not None:
        target_device = logits.device
        lengths = torch.tensor([len(span.targets) for _, span in spans], device=target_device)
        where = [(row, span.start + i) for row, span in spans for i in range(len(span.targets))]
        targets = torch.tensor([t for _, span in spans for t in span.targets], device=target_device)
        rows, positions = torch.tensor(where, device=target_device).unbind(1)
        group = model.pg_collection.tp
        logprobs, best = _token_scores(logits[rows, positions], targets, vocab_size, group)
        owner = torch.arange(len(spans), device=target_device).repeat_interleave(lengths)
        sums = torch.zeros(len(spans), dtype=torch.float32, device=target_device)
        sums.index_add_(0, owner, logprobs)
        hits = torch.zeros(len(spans), dtype=torch.int64, device=target_device)
        hits.index_add_(0, owner, best.long())
        scores = torch.stack((sums.cpu().double(), (hits == lengths).cpu().double()), dim=1)
    if groups.mp.size() > 1:
        shared = scores.float().to(device.current().torch_device())
        dist.broadcast(shared, src=groups.sampling_rank, group=groups.mp)
        scores = shared.cpu()
    return scores.tolist()


def _token_scores(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and whether it is the argmax (the lowest id on ties).

    Args:
        logits: This rank's shard of the vocabulary, ``[n, v / tp]``.
        targets: int64 ``[n]``.
        vocab_size: Ids from here on are padding.
        group: Tensor-parallel group.

    Returns:
        fp32 ``[n]`` and bool ``[n]``.
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
    winner = (best_column + first).masked_fill(best < largest, _INVALID_ID)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
        dist.all_reduce(winner, dist.ReduceOp.MIN, group=group)
    return target - largest - total.log(), winner == targets


def _pad(batch: Sequence[_Input]) -> torch.Tensor:
    """Token ids padded on the right, int64 ``[b, s]``."""
    longest = max(len(item.tokens) for item in batch)
    return torch.tensor([[*item.tokens, *[0] * (longest - len(item.tokens))] for item in batch])


def _forward(model: Any, tokens: torch.Tensor, groups: ModelParallelGroups) -> torch.Tensor | None:
    """Logits ``[b, s, v / tp]`` of ``tokens`` ``[b, s]`` on the last stage; None elsewhere."""
    target_device = device.current().torch_device()
    batch, length = tokens.shape

    def stage() -> torch.Tensor:
        return model(  # type: ignore[no-any-return]
            tokens.to(target_device),
            torch.arange(length, device=target_device).expand(batch, -1),
            torch.ones(1, 1, length, length, dtype=torch.bool, device=target_device).triu(1),
            runtime_gather_output=False,
        )

    return groups.run_stage(model, batch, length, stage)


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
