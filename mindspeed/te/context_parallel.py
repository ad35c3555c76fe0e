"""Attention of a module whose sequence is split over ranks.

What a module knows (groups, mask type, window) and the strategy of its layer become a plan of
:mod:`mindspeed.attention`, which is made once. Ranks own the zigzag chunks that Megatron's batches
are cut into, unless a packed batch says what they own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

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
from mindspeed.attention.strategy import Strategy
from mindspeed.errors import ConfigError
from mindspeed.te.masks import Window

if TYPE_CHECKING:
    from mindspeed.attention.packed import PackedBatch


def group_size(groups: Any) -> int:
    """Ranks of a group, or of the groups of a hierarchy together; 1 for None."""
    size = 1
    for group in groups if isinstance(groups, list) else [groups]:
        size *= 1 if group is None else group.size()
    return size


def lowest_level(groups: Any) -> int:
    """Ranks of the first group of a hierarchy, which exchange rows for heads; 1 without one."""
    return groups[0].size() if isinstance(groups, list) else 1  # type: ignore[no-any-return]


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
        mask = _mask(borders, causal, None if window is None else (int(window[0]), int(window[1])))
    plan = strategy.plan(mask, layout, layer)
    # One behind the other, samples are rows of one sequence whose parts do not see each other.
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    run = functools.partial(context_parallel_attention, scale=scale, dropout=dropout)
    if inner is None:
        out = run(q, k, v, plan, outer, sink=sink, slopes=slopes)
    else:
        split = _heads(layout, inner, outer)
        mine = split.heads(split.rank, heads)
        of_head = slice(mine.start, mine.stop)
        sink, slopes = (None if x is None else x[of_head] for x in (sink, slopes))
        out = run(*split.split(q, k, v), plan, outer, sink=sink, slopes=slopes)
        out = split.join(out, heads)
    return out.unflatten(0, (samples, rows)).transpose(0, 1).flatten(2)


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
    if strategy.ulysses_degree == 1:
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


@functools.lru_cache(maxsize=64)
def _mask(borders: tuple[int, ...], causal: bool, window: tuple[int, int] | None) -> Mask:
    if window is not None:
        before, after = (borders[-1] if side < 0 else side for side in window)
        window = before, after
    return Mask.documents(borders, causal=causal, window=window)


@functools.lru_cache(maxsize=64)
def _samples(length: int, samples: int) -> tuple[int, ...]:
    return tuple(length * sample for sample in range(samples + 1))


def _heads(layout: Layout, inner: dist.ProcessGroup, outer: Any) -> HeadSplit:
    first = 0 if outer is None else dist.get_rank(outer) * inner.size()
    members = layout.segments[first : first + inner.size()]
    return HeadSplit(Layout(members), dist.get_rank(inner), inner)
