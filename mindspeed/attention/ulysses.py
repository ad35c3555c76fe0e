"""Ulysses: exchange rows for heads, so that every rank attends to all tokens with some heads.

Before: a rank has its rows and all heads. After: the rows of all ranks of the group, in ascending
order of positions, and its share of the heads. Queries, keys and values for one destination travel
in one message, so there is one collective before the attention and one behind it. A key head goes
once to every rank with a query head that uses it. Heads need not divide: rank i of U gets heads
``n i // U`` to ``n (i + 1) // U``.

Bytes sent by a rank, forward: ``(U - 1) / U * (2 Q + KV')`` where KV' counts a key head as often as
it is sent. Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention.layout import Layout


@dataclass(frozen=True)
class HeadSplit:
    """An exchange of rows for heads among the ranks of a group.

    Attributes:
        layout: Rows of the group's ranks, in the order of the group.
        rank: This rank's place in the group.
        group: The ranks.
    """

    layout: Layout
    rank: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.layout.ranks

    def heads(self, rank: int, heads: int) -> range:
        """Query heads of a rank after the exchange."""
        return range(heads * rank // self.size, heads * (rank + 1) // self.size)

    def groups(self, rank: int, heads: int, groups: int) -> range:
        """Key heads that a rank's query heads use."""
        own, share = self.heads(rank, heads), heads // groups
        return range(own.start // share, (own.stop - 1) // share + 1) if own else range(0)

    def balance(self, heads: int) -> float:
        """Mean over largest number of heads."""
        return heads / self.size / max(len(self.heads(rank, heads)) for rank in range(self.size))

    def split(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[t, n, d]`` of my rows to ``[T, n', d]`` of all rows, ascending; k and v alike.

        Key heads are repeated where a rank's query heads use them unequally often.
        """
        heads, groups = q.shape[1], k.shape[1]
        q, k, v = _Split.apply(self, q, k, v)
        share = heads // groups
        first = self.groups(self.rank, heads, groups).start
        used = [head // share - first for head in self.heads(self.rank, heads)]
        counts = {used.count(group) for group in used}
        if len(counts) > 1:
            index = torch.tensor(used, device=k.device)
            k, v = k.index_select(1, index), v.index_select(1, index)
        return q, k, v

    def join(self, out: torch.Tensor, heads: int) -> torch.Tensor:
        """``[T, n', d]`` of all rows back to ``[t, n, d]`` of my rows with all heads."""
        return _Join.apply(self, out, heads)  # type: ignore[no-any-return]

    def order(self) -> torch.Tensor:
        """For each row in ascending order of positions, its row in the order of the ranks."""
        return _order(self.layout)

    def rows(self, rank: int) -> int:
        """Rows of a rank before the exchange."""
        return sum(b - a for a, b in self.layout.segments[rank])


@functools.lru_cache(maxsize=64)  # the same for every layer and step
def _order(layout: Layout) -> torch.Tensor:
    return torch.cat([layout.positions(rank) for rank in range(layout.ranks)]).argsort()


def _exchange(
    split: HeadSplit, parts: list[list[torch.Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[torch.Tensor]]:
    """Send ``parts[j]`` to rank j and get tensors of ``shapes[i]`` from rank i: one collective."""
    sent = [torch.cat([x.reshape(-1) for x in tensors]) for tensors in parts]
    sizes = [[torch.Size(shape).numel() for shape in wanted] for wanted in shapes]
    received = sent[0].new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(
        received, torch.cat(sent), [sum(size) for size in sizes], [len(x) for x in sent],
        group=split.group,
    )  # fmt: skip
    flat = iter(received.split([n for size in sizes for n in size]))
    return [[next(flat).view(shape) for shape in wanted] for wanted in shapes]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: HeadSplit, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.split, ctx.shapes = split, [x.shape for x in qkv]
        ranges = [_columns(split, rank, ctx.shapes) for rank in range(split.size)]
        parts = [
            [x[:, cols.start : cols.stop] for x, cols in zip(qkv, ranges[rank], strict=True)]
            for rank in range(split.size)
        ]
        mine = ranges[split.rank]
        shapes = [
            [(split.rows(rank), len(c), x.shape[2]) for x, c in zip(qkv, mine, strict=True)]
            for rank in range(split.size)
        ]
        received = _exchange(split, parts, shapes)
        order = split.order().to(qkv[0].device)
        return tuple(
            torch.cat([received[rank][n] for rank in range(split.size)])[order] for n in range(3)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        split: HeadSplit = ctx.split
        back = split.order().argsort().to(grads[0].device)
        rows = [split.rows(rank) for rank in range(split.size)]
        by_rank = [x[back].split(rows) for x in grads]
        ranges = [_columns(split, rank, ctx.shapes) for rank in range(split.size)]
        shapes = [
            [
                (rows[split.rank], len(c), s[2])
                for c, s in zip(ranges[rank], ctx.shapes, strict=True)
            ]
            for rank in range(split.size)
        ]
        parts = [[x[rank] for x in by_rank] for rank in range(split.size)]
        received = _exchange(split, parts, shapes)
        wide = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
        sums = [grads[0].new_zeros(shape, dtype=wide) for shape in ctx.shapes]
        for columns, tensors in zip(ranges, received, strict=True):
            for total, cols, part in zip(sums, columns, tensors, strict=True):
                total[:, cols.start : cols.stop] += part
        return (None, *(x.to(grads[0].dtype) for x in sums))


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: HeadSplit, out: torch.Tensor, heads: int) -> torch.Tensor:
        ctx.split, ctx.heads = split, heads
        rows = [split.rows(rank) for rank in range(split.size)]
        parts = [[x] for x in out[split.order().argsort().to(out.device)].split(rows)]
        shapes = [
            [(rows[split.rank], len(split.heads(rank, heads)), out.shape[2])]
            for rank in range(split.size)
        ]
        return torch.cat([x for (x,) in _exchange(split, parts, shapes)], 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        split, heads = ctx.split, ctx.heads
        dout = grads[0]
        ranges = [split.heads(rank, heads) for rank in range(split.size)]
        parts = [[dout[:, r.start : r.stop]] for r in ranges]
        mine = len(ranges[split.rank])
        shapes = [[(split.rows(rank), mine, dout.shape[2])] for rank in range(split.size)]
        received = torch.cat([x for (x,) in _exchange(split, parts, shapes)])
        return None, received[split.order().to(dout.device)], None


def _columns(split: HeadSplit, rank: int, shapes: list[torch.Size]) -> list[range]:
    heads, groups = shapes[0][1], shapes[1][1]
    keys = split.groups(rank, heads, groups)
    return [split.heads(rank, heads), keys, keys]
