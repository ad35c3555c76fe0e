"""Attention over a sequence that context-parallel ranks share.

The groups, mask type and window of a module and the strategy of its layer become a plan of
:mod:`mindspeed.attention`, made once. This module is imported when such a sequence is first met
(:mod:`mindspeed.te.core_attention`). How the sequence is sharded:

    sbhd                  zigzag chunks of every sample, as Megatron shards its batches
    sbhd, packed batch    as the batch says
    thd                   zigzag chunks of every document, as Transformer Engine shards them
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.attention import (
    HeadAllToAll,
    Mask,
    SequenceSharding,
    context_parallel_attention,
    contiguous,
    zigzag,
)
from mindspeed.attention.packed_batch import PackedBatch
from mindspeed.attention.strategy import Strategy
from mindspeed.attention.ulysses_attention import ulysses_attention
from mindspeed.errors import ConfigError
from mindspeed.te import attention_policy
from mindspeed.te.attention import Documents
from mindspeed.te.context_groups import group_size
from mindspeed.te.flash import copied
from mindspeed.te.masks import Window

_BALANCED = 0.95
"""Balance of an uneven head split below which the remaining heads use a ring instead."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Any,
    strategy: Strategy,
    *,
    scale: float,
    causal: bool = True,
    window: Window = None,
    mask: Mask | None = None,
    packed: PackedBatch | None = None,
    slopes: Tensor | None = None,
    dropout: float = 0.0,
    sink: Tensor | None = None,
    layer: int = 1,
) -> Tensor:
    """Attend over the sequence of all ranks; differentiable. Collective.

    Args:
        q: ``[s, b, n, d]``, this rank's tokens.
        k: ``[s, b, n_kv, d]``.
        v: ``[s, b, n_kv, d_v]``.
        groups: The context-parallel group; for the hybrid strategies the Ulysses group and the
            ring group.
        window: Sliding window: earlier and later keys that a query sees, -1 for all.
        mask: Mask of all samples, instead of ``causal`` and ``window``.
        packed: Documents that do not see each other, and how they are sharded.
        slopes: ALiBi, fp32 ``[n]`` of this tensor-parallel rank's heads.
        dropout: Probability of dropping a probability.
        sink: ``[n]`` score of a key without a value.
        layer: Number of the layer in the model, from 1.

    Returns:
        ``[s, b, n * d_v]`` of this rank, in the dtype of q.

    Raises:
        ConfigError: The groups do not fit the strategy, or the sizes the packed batch.
    """
    inner, outer = _split_groups(groups, strategy)
    tokens, samples, heads = q.shape[:3]
    size = group_size(groups)
    length = tokens * size
    if packed is not None:
        layout, cu_seqlens = packed.sharding, packed.cu_seqlens
    else:
        layout, cu_seqlens = megatron_layout(length, size, samples), _samples(length, samples)
    if mask is None:
        mask = _mask(cu_seqlens, causal, _bounds(window))
    plan = strategy.plan(mask, layout, layer)
    # Samples are concatenated to one sequence whose parts do not see each other.
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
        # Where the ranks do not divide the heads, a ring computes the remaining heads.
        uneven = outer is None and split.balance(heads) < _BALANCED
        rest = Strategy("ring").plan(mask, layout) if uneven else None
        repeats = outer is None and k.shape[1] < split.size
        cache = strategy.cache_of(layer) if repeats else None
        out = ulysses_attention(q, k, v, split, plan, outer, rest=rest, cache=cache, **options)
    elif strategy.algorithm == "all_gather" and strategy.head_groups > 1:
        out = _attend_in_parts(strategy.head_groups, q, k, v, plan, outer, **options)
    else:
        out = context_parallel_attention(q, k, v, plan, outer, **options)
    return out.unflatten(0, (samples, tokens)).transpose(0, 1).flatten(2)


def _attend_in_parts(
    parts: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *plan_and_group: Any,
    sink: Tensor | None,
    slopes: Tensor | None,
    **options: Any,
) -> Tensor:
    """Attend with one group of key heads after the other, which bounds the gathered keys."""
    groups, share = k.shape[1], q.shape[1] // k.shape[1]
    bounds = [groups * part // parts for part in range(parts + 1)]
    outs = []
    for first, last in itertools.pairwise(bounds):
        if first < last:
            mine, keys = slice(share * first, share * last), slice(first, last)
            of_mine = [None if x is None else x[mine] for x in (sink, slopes)]
            options |= {"sink": of_mine[0], "slopes": of_mine[1]}
            part = q[:, mine], k[:, keys], v[:, keys]
            outs.append(context_parallel_attention(*part, *plan_and_group, **options))
    return torch.cat(outs, 1)


def attend_thd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    groups: Any,
    strategy: Strategy,
    *,
    causal: bool,
    window: Window,
    **options: Any,
) -> Tensor:
    """Attend within documents that ranks share; differentiable. Collective.

    Args:
        q: ``[t, n, d]``: of every document, in turn, the two chunks of this rank; any floating
            dtype, which the result has, too.
        k: ``[t, n_kv, d]``.
        v: ``[t, n_kv, d_v]``.
        documents: Cumulative lengths over all ranks; queries and keys have the same.
        options: Other arguments of :func:`attend`.

    Returns:
        ``[t, n * d_v]`` of this rank; zero for padding between documents.

    Raises:
        ConfigError: A document with its padding does not divide into two chunks for each rank.
    """
    real = documents.cu_seqlens_q
    padded = real if documents.cu_seqlens_q_padded is None else documents.cu_seqlens_q_padded
    lengths, starts = (tuple(copied(x).tolist()) for x in (real, padded))  # type: ignore[union-attr]
    packed = sharded_documents(starts, group_size(groups))
    mask = _padded(lengths, starts, causal, _bounds(window))
    q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    return attend(q, k, v, groups, strategy, mask=mask, packed=packed, **options).squeeze(1)


@functools.lru_cache(maxsize=64)
def megatron_layout(length: int, ranks: int, samples: int) -> SequenceSharding:
    """Sharding of Megatron's batches; contiguous where 2 p does not divide the length.

    Args:
        length: Tokens of a sample, of all ranks.
        ranks: Ranks that share it.
    """
    shard = zigzag if length % (2 * ranks) == 0 else contiguous
    return shard(length, ranks, samples)


def _split_groups(groups: Any, strategy: Strategy) -> tuple[Any, Any]:
    """The Ulysses (all-to-all) group and the group that runs a plan; None where there is none."""
    name = strategy.algorithm
    if not strategy.hybrid:
        if isinstance(groups, list):
            raise ConfigError(f"context parallelism by {name!r} takes one group, not {len(groups)}")
        return (groups, None) if name == "ulysses" else (None, groups)
    if not isinstance(groups, list) or len(groups) != 2:
        raise ConfigError(
            f"context parallelism by {name!r} takes two groups: "
            "--hierarchical-context-parallel-sizes needs two numbers, the ranks of the Ulysses "
            "all-to-all and of the ring"
        )
    if groups[0].size() != strategy.ulysses_degree:
        raise ConfigError(
            f"context parallelism by {name!r}: the Ulysses group has {groups[0].size()} ranks, "
            f"--ulysses-degree-in-cp is {strategy.ulysses_degree}"
        )
    return groups[0], groups[1]


def _bounds(window: Window) -> tuple[int, int] | None:
    return None if window is None else (int(window[0]), int(window[1]))


@functools.lru_cache(maxsize=64)
def _mask(cu_seqlens: tuple[int, ...], causal: bool, window: tuple[int, int] | None) -> Mask:
    if window is not None:
        before, after = (cu_seqlens[-1] if side < 0 else side for side in window)
        window = before, after
    return Mask.documents(cu_seqlens, causal=causal, window=window)


@functools.lru_cache(maxsize=64)
def _padded(
    cu_seqlens: tuple[int, ...],
    starts: tuple[int, ...],
    causal: bool,
    window: tuple[int, int] | None,
) -> Mask:
    """Documents of ``cu_seqlens`` that begin at ``starts``; padding is masked."""
    regions = []
    for (a, b), start in zip(itertools.pairwise(cu_seqlens), starts, strict=False):
        document = _mask((0, b - a), causal, window)
        regions += [region.shifted(start, start) for region in document.regions]
    return Mask(starts[-1], tuple(regions))


@functools.lru_cache(maxsize=64)
def sharded_documents(starts: tuple[int, ...], ranks: int) -> PackedBatch:
    """Documents of which each rank has two chunks, as Transformer Engine shards them.

    Args:
        starts: Where documents begin, padding included, and the end of the last one.
        ranks: Ranks that share each document.

    Raises:
        ConfigError: A document with its padding does not divide into two chunks for each rank.
    """
    own: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, end in itertools.pairwise(starts):
        if (end - start) % (2 * ranks):
            raise ConfigError(
                f"context parallel: a document of {end - start} tokens with its padding must be "
                f"divisible by 2*CP={2 * ranks}; pad documents, or use --reset-attention-mask, "
                "which shards the whole sequence"
            )
        for segments, parts in zip(own, zigzag(end - start, ranks).segments, strict=True):
            segments += [(start + a, start + b) for a, b in parts]
    layout = SequenceSharding(tuple(map(tuple, own)))
    return PackedBatch(starts, 1, starts[-1], layout, torch.empty(0, dtype=torch.int64))


@functools.lru_cache(maxsize=64)
def _samples(length: int, samples: int) -> tuple[int, ...]:
    return tuple(length * sample for sample in range(samples + 1))


def _heads(layout: SequenceSharding, inner: dist.ProcessGroup, outer: Any) -> HeadAllToAll:
    first = 0 if outer is None else dist.get_rank(outer) * inner.size()
    members = layout.segments[first : first + inner.size()]
    return HeadAllToAll(SequenceSharding(members), dist.get_rank(inner), inner)
