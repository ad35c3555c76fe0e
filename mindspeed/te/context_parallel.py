"""Attention of a module whose sequence is split over ranks, by Megatron's ``--cp-comm-type``.

    p2p          a ring: keys and values go from neighbour to neighbour
    all_gather   every rank gets all keys and values
    a2a          rows are exchanged for heads (Ulysses)
    a2a+p2p      heads among neighbours, a ring among the groups of neighbours

Ranks own the zigzag chunks that Megatron's batches are cut into. The algorithms are in
:mod:`mindspeed.attention`; here a module's arguments become a plan, which is made once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention import (
    HeadSplit,
    Layout,
    Mask,
    Plan,
    context_parallel_attention,
    contiguous,
    planners,
    zigzag,
)
from mindspeed.attention.layout import union
from mindspeed.te.masks import Window

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


@dataclass(frozen=True)
class Sequence:
    """A sequence split over ranks, as a key of plans.

    Attributes:
        length: Tokens of a sample, of all ranks.
        samples: Samples of the batch.
        ranks: Ranks that share it.
        causal: A query sees no key behind it.
        window: Keys before and behind that a query sees, -1 for all; None for no window.
    """

    length: int
    samples: int
    ranks: int
    causal: bool
    window: tuple[int, int] | None

    def mask(self) -> Mask:
        """What the queries of all samples see."""
        window = None
        if self.window is not None:
            before, after = self.window
            window = (
                self.length if before < 0 else before,
                self.length if after < 0 else after,
            )
        one = Mask.documents((0, self.length), causal=self.causal, window=window)
        return Mask.batch([one] * self.samples)


def group_size(groups: Any) -> int:
    """Ranks of a group, or of the groups of a hierarchy together; 1 for None."""
    size = 1
    for group in groups if isinstance(groups, list) else [groups]:
        size *= 1 if group is None else group.size()
    return size


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    groups: Any,
    comm_type: str,
    *,
    causal: bool,
    window: Window,
    scale: float,
    dropout: float,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attend; ``[s, b, n, d]`` of this rank, the result ``[s, b, n * d_v]``. Collective.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        groups: The context-parallel group; for ``a2a+p2p`` the groups of neighbours and of rings.
        comm_type: One of :data:`COMM_TYPES`.
        causal: A query sees no key behind it.
        window: Sliding window.
        scale: Factor on the scores.
        dropout: Probability of dropping a probability.
        sink: ``[n]`` score of a key without a value.

    Raises:
        ValueError: Unknown ``comm_type``, or groups that do not fit it.
    """
    inner, outer = _split_groups(groups, comm_type)
    rows, samples, heads = q.shape[:3]
    size = group_size(groups)
    bounds = None if window is None else (int(window[0]), int(window[1]))
    sequence = Sequence(rows * size, samples, size, causal, bounds)
    # One behind the other, samples are rows of one sequence whose parts do not see each other.
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    run = functools.partial(context_parallel_attention, scale=scale, dropout=dropout)
    if inner is None:
        make = planners.all_gather if comm_type == "all_gather" else planners.ring
        out = run(q, k, v, _plan(make, sequence, 1), outer, sink=sink)
    else:
        split = _heads(sequence, inner, outer)
        mine = split.heads(split.rank, heads)
        sinks = None if sink is None else sink[mine.start : mine.stop]
        plan = _plan(planners.ring, sequence, inner.size())
        out = split.join(run(*split.split(q, k, v), plan, outer, sink=sinks), heads)
    return out.unflatten(0, (samples, rows)).transpose(0, 1).flatten(2)


def _split_groups(groups: Any, comm_type: str) -> tuple[Any, Any]:
    """Groups that exchange heads and that run a plan; None where there is none."""
    if comm_type not in COMM_TYPES:
        raise ValueError(f"cp_comm_type {comm_type!r} is not one of {', '.join(COMM_TYPES)}")
    if comm_type != "a2a+p2p":
        if isinstance(groups, list):
            raise ValueError(f"cp_comm_type {comm_type!r} takes one group, not {len(groups)}")
        return (groups, None) if comm_type == "a2a" else (None, groups)
    if not isinstance(groups, list) or len(groups) != 2:
        raise ValueError(
            "cp_comm_type 'a2a+p2p' takes two groups: --hierarchical-context-parallel-sizes needs "
            "two numbers, ranks that exchange heads and ranks of a ring"
        )
    return groups[0], groups[1]


@functools.lru_cache(maxsize=64)
def _plan(make: Any, sequence: Sequence, inner: int) -> Plan:
    """A plan for the outer ranks, each of which stands for ``inner`` neighbours."""
    return make(sequence.mask(), _merged(sequence, inner))  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=64)
def _merged(sequence: Sequence, inner: int) -> Layout:
    layout = _layout(sequence)
    if inner == 1:
        return layout
    members = [layout.segments[first : first + inner] for first in range(0, layout.ranks, inner)]
    return Layout(tuple(union(part for own in group for part in own) for group in members))


def _layout(sequence: Sequence) -> Layout:
    cut = zigzag if sequence.length % (2 * sequence.ranks) == 0 else contiguous
    return cut(sequence.length, sequence.ranks, sequence.samples)


def _heads(sequence: Sequence, inner: dist.ProcessGroup, outer: Any) -> HeadSplit:
    first = 0 if outer is None else dist.get_rank(outer) * inner.size()
    members = _layout(sequence).segments[first : first + inner.size()]
    return HeadSplit(Layout(members), dist.get_rank(inner), inner)
