"""Attention of a module whose sequence is split over ranks.

What a module knows (groups, mask type, window) and the strategy of its layer become a plan of
:mod:`mindspeed.attention`, which is made once. Modules import this file when they first meet such a
sequence (:mod:`mindspeed.te.context_groups` tells). Who owns which tokens:

    sbhd                  zigzag chunks of every sample, as Megatron cuts its batches
    sbhd, packed batch    what the batch says
    thd                   zigzag chunks of every document, as Transformer Engine cuts them
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention import (
    HeadSplit,
    Layout,
    Mask,
    context_parallel_attention,
    contiguous,
    zigzag,
)
from mindspeed.attention.by_heads import ulysses_attention
from mindspeed.attention.packed import PackedBatch
from mindspeed.attention.strategy import Strategy
from mindspeed.errors import ConfigError
from mindspeed.te import attention_policy
from mindspeed.te.attention import Documents
from mindspeed.te.context_groups import group_size
from mindspeed.te.flash import copied
from mindspeed.te.masks import Window

_BALANCED = 0.95
"""Below it, heads that do not divide are attended to where their rows are."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    groups: Any,
    strategy: Strategy,
    *,
    scale: float,
    causal: bool = True,
    window: Window = None,
    mask: Mask | None = None,
    packed: PackedBatch | None = None,
    slopes: torch.Tensor | None = None,
    dropout: float = 0.0,
    sink: torch.Tensor | None = None,
    layer: int = 1,
) -> torch.Tensor:
    """Attend; ``[s, b, n, d]`` of this rank, the result ``[s, b, n * d_v]``. Collective.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        groups: The context-parallel group; for the hybrid strategies the groups of neighbours and
            of the ring between them.
        strategy: The algorithm.
        scale: Factor on the scores.
        causal: A query sees no key behind it.
        window: Sliding window: keys before and behind that a query sees, -1 for all.
        mask: What the queries of all samples see, instead of ``causal`` and ``window``.
        packed: Documents that do not see each other, and who owns which tokens.
        slopes: ALiBi, fp32 ``[n]`` of this tensor-parallel rank's heads.
        dropout: Probability of dropping a probability.
        sink: ``[n]`` score of a key without a value.
        layer: Number of the layer in the model, from 1.

    Raises:
        ConfigError: The groups do not fit the strategy, or the sizes the packed batch.
    """
    inner, outer = _split_groups(groups, strategy)
    rows, samples, heads = q.shape[:3]
    size = group_size(groups)
    length = rows * size
    if packed is not None:
        layout, borders = packed.layout, packed.cu_seqlens
    else:
        layout, borders = megatron_layout(length, size, samples), _samples(length, samples)
    if mask is None:
        mask = _mask(borders, causal, _bounds(window))
    plan = strategy.plan(mask, layout, layer)
    # One behind the other, samples are rows of one sequence whose parts do not see each other.
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    options: dict[str, Any] = {
        "scale": scale,
        "dropout": dropout,
        "slopes": slopes,
        "sink": sink,
        "fused_merge": strategy.fused_merge,
        "overlap_group": None if plan.ranks == 1 else attention_policy.overlap_group(outer),
    }
    if inner is not None:
        split = _heads(layout, inner, outer)
        # Where heads do not divide, a ring takes those that are left over.
        uneven = outer is None and split.balance(heads) < _BALANCED
        rest = Strategy("ring").plan(mask, layout) if uneven else None
        repeats = outer is None and k.shape[1] < split.size
        cache = strategy.cache_of(layer) if repeats else None
        out = ulysses_attention(q, k, v, split, plan, outer, rest=rest, cache=cache, **options)
    elif strategy.algorithm == "all_gather" and strategy.head_groups > 1:
        out = _attend_in_parts(strategy.head_groups, q, k, v, plan, outer, **options)
    else:
        out = context_parallel_attention(q, k, v, plan, outer, **options)
    return out.unflatten(0, (samples, rows)).transpose(0, 1).flatten(2)


def _attend_in_parts(
    parts: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *plan_and_group: Any,
    sink: torch.Tensor | None,
    slopes: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Attend with some of the key heads after the others: less is held at a time."""
    groups, share = k.shape[1], q.shape[1] // k.shape[1]
    cuts = [groups * part // parts for part in range(parts + 1)]
    outs = []
    for first, last in itertools.pairwise(cuts):
        if first < last:
            mine, keys = slice(share * first, share * last), slice(first, last)
            of_mine = [None if x is None else x[mine] for x in (sink, slopes)]
            options |= {"sink": of_mine[0], "slopes": of_mine[1]}
            part = q[:, mine], k[:, keys], v[:, keys]
            outs.append(context_parallel_attention(*part, *plan_and_group, **options))
    return torch.cat(outs, 1)


def attend_thd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    groups: Any,
    strategy: Strategy,
    *,
    causal: bool,
    window: Window,
    **options: Any,
) -> torch.Tensor:
    """Attend within documents; ``[t, n, d]`` of this rank, the result ``[t, n * d_v]``. Collective.

    Rows of padding between documents are zero.

    Args:
        q: Queries: of every document, in turn, the two chunks of this rank.
        k: Keys.
        v: Values.
        documents: Borders on all ranks together; queries and keys have the same.
        groups: As in :func:`attend`.
        strategy: As in :func:`attend`.
        causal: A query sees no key behind it.
        window: As in :func:`attend`.
        options: Further arguments of :func:`attend`.

    Raises:
        ConfigError: A document with its padding does not divide into two chunks for each rank.
    """
    real = documents.cu_seqlens_q
    borders = real if documents.cu_seqlens_q_padded is None else documents.cu_seqlens_q_padded
    lengths, starts = (tuple(copied(x).tolist()) for x in (real, borders))  # type: ignore[union-attr]
    packed = _cut_each(starts, group_size(groups))
    mask = _padded(lengths, starts, causal, _bounds(window))
    q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    return attend(q, k, v, groups, strategy, mask=mask, packed=packed, **options).squeeze(1)


@functools.lru_cache(maxsize=64)
def megatron_layout(length: int, ranks: int, samples: int) -> Layout:
    """Who owns which tokens of Megatron's batches; contiguous parts where zigzag does not divide.

    Args:
        length: Tokens of a sample, of all ranks.
        ranks: Ranks that share it.
        samples: Samples of the batch.
    """
    cut = zigzag if length % (2 * ranks) == 0 else contiguous
    return cut(length, ranks, samples)


def _split_groups(groups: Any, strategy: Strategy) -> tuple[Any, Any]:
    """Groups that exchange heads and that run a plan; None where there is none."""
    name = strategy.algorithm
    if not strategy.hybrid:
        if isinstance(groups, list):
            raise ConfigError(f"context parallelism by {name!r} takes one group, not {len(groups)}")
        return (groups, None) if name == "ulysses" else (None, groups)
    if not isinstance(groups, list) or len(groups) != 2:
        raise ConfigError(
            f"context parallelism by {name!r} takes two groups: "
            "--hierarchical-context-parallel-sizes needs two numbers, ranks that exchange heads "
            "and ranks of a ring"
        )
    if groups[0].size() != strategy.ulysses_degree:
        raise ConfigError(
            f"context parallelism by {name!r}: {groups[0].size()} ranks exchange heads, "
            f"--ulysses-degree-in-cp is {strategy.ulysses_degree}"
        )
    return groups[0], groups[1]


def _bounds(window: Window) -> tuple[int, int] | None:
    return None if window is None else (int(window[0]), int(window[1]))


@functools.lru_cache(maxsize=64)
def _mask(borders: tuple[int, ...], causal: bool, window: tuple[int, int] | None) -> Mask:
    if window is not None:
        before, after = (borders[-1] if side < 0 else side for side in window)
        window = before, after
    return Mask.documents(borders, causal=causal, window=window)


@functools.lru_cache(maxsize=64)
def _padded(
    borders: tuple[int, ...],
    starts: tuple[int, ...],
    causal: bool,
    window: tuple[int, int] | None,
) -> Mask:
    """Documents with ``borders`` that begin at ``starts``: padding sees and shows nothing."""
    regions = []
    for (a, b), start in zip(itertools.pairwise(borders), starts, strict=False):
        document = _mask((0, b - a), causal, window)
        regions += [region.shifted(start, start) for region in document.regions]
    return Mask(starts[-1], tuple(regions))


@functools.lru_cache(maxsize=64)
def _cut_each(starts: tuple[int, ...], ranks: int) -> PackedBatch:
    """Every document cut into two chunks for each rank."""
    own: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, end in itertools.pairwise(starts):
        if (end - start) % (2 * ranks):
            raise ConfigError(
                f"context parallel: a document of {end - start} tokens with its padding must be "
                f"divisible by 2*CP={2 * ranks}; pad documents, or use --reset-attention-mask, "
                "which cuts the whole sequence"
            )
        for segments, parts in zip(own, zigzag(end - start, ranks).segments, strict=True):
            segments += [(start + a, start + b) for a, b in parts]
    layout = Layout(tuple(map(tuple, own)))
    return PackedBatch(starts, 1, starts[-1], layout, torch.empty(0, dtype=torch.int64))


@functools.lru_cache(maxsize=64)
def _samples(length: int, samples: int) -> tuple[int, ...]:
    return tuple(length * sample for sample in range(samples + 1))


def _heads(layout: Layout, inner: dist.ProcessGroup, outer: Any) -> HeadSplit:
    first = 0 if outer is None else dist.get_rank(outer) * inner.size()
    members = layout.segments[first : first + inner.size()]
    return HeadSplit(Layout(members), dist.get_rank(inner), inner)
