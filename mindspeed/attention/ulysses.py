"""Ulysses: exchange rows for heads, so that every rank attends to all tokens with some heads.

Before: a rank has its rows and all heads. After: the rows of all ranks of the group, in ascending
order of positions, and its share of the heads. Queries, keys and values for one destination travel
in one message, so there is one collective before the attention and one behind it. A key head goes
once to every rank with a query head that uses it. Heads need not divide: rank i of U gets heads
``n i // U`` to ``n (i + 1) // U``.

Bytes sent by a rank, forward and backward alike: ``(U - 1) / U * (2 Q + KV')`` where KV' counts a
key head as often as it is sent. With fewer key heads than ranks, keys and values take U / g times
the memory after the exchange; :meth:`HeadSplit.again` keeps them as they were before it, for
``(U - 1) / U KV'`` more bytes in the backward pass.

Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention.layout import Layout
from mindspeed.attention.planners.cache import POLICIES
from mindspeed.errors import ConfigError


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

    def groups(self, rank: int, heads: int, share: int) -> range:
        """Key heads that a rank's query heads use, ``share`` query heads one."""
        own = self.heads(rank, heads)
        return range(own.start // share, (own.stop - 1) // share + 1) if own else range(0)

    def balance(self, heads: int) -> float:
        """Mean over largest number of heads."""
        return heads / self.size / max(len(self.heads(rank, heads)) for rank in range(self.size))

    def split(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, share: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[t, n, d]`` of my rows to ``[T, n', d]`` of all rows, ascending; k and v alike.

        Key heads are repeated where a rank's query heads use them unequally often.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            share: Query heads that use a key head; by default all key heads are used.
        """
        heads = q.shape[1]
        share = heads // k.shape[1] if share is None else share
        q, k, v = _Split.apply(self, share, q, k, v)
        k, v = self.repeated(heads, share, k, v)
        return q, k, v

    def repeated(self, heads: int, share: int, *keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Key heads after the exchange, once for each query head if used unequally often."""
        first = self.groups(self.rank, heads, share).start
        used = [head // share - first for head in self.heads(self.rank, heads)]
        if len({used.count(group) for group in used}) <= 1:
            return keys
        index = torch.tensor(used, device=keys[0].device)
        return tuple(x.index_select(1, index) for x in keys)

    def again(
        self, heads: int, k: torch.Tensor, v: torch.Tensor, policy: str, share: int | None = None
    ) -> KeysAgain:
        """Keep keys and values for the backward pass as they are before the exchange.

        Args:
            heads: Query heads.
            k: Keys before the exchange.
            v: Values before the exchange.
            policy: ``full`` for both, ``half`` for the keys.
            share: As in :meth:`split`.

        Raises:
            ConfigError: Unknown policy, or the exchange repeats no key head, so that this would
                save no memory.
        """
        if policy not in POLICIES:
            raise ConfigError(f"ulysses: KV cache policy {policy!r} is not one of full, half")
        share = heads // k.shape[1] if share is None else share
        sent = sum(len(self.groups(rank, heads, share)) for rank in range(self.size))
        if sent <= k.shape[1]:
            raise ConfigError(
                f"ulysses: KV cache policy {policy!r} keeps keys before the exchange, which saves "
                f"memory only where it repeats key heads; n_kv={k.shape[1]} over CP={self.size} "
                "repeats none"
            )
        values = v.detach() if policy == "full" else None
        return KeysAgain(self, heads, share, k.detach(), values)

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


def _to_heads(
    split: HeadSplit, tensors: Sequence[torch.Tensor], columns: Sequence[Sequence[range]]
) -> list[torch.Tensor]:
    """Heads ``columns[rank]`` of every tensor to every rank: mine of all rows, ascending."""
    parts = [
        [x[:, cols.start : cols.stop] for x, cols in zip(tensors, of_rank, strict=True)]
        for of_rank in columns
    ]
    mine = columns[split.rank]
    shapes = [
        [(split.rows(rank), len(cols), x.shape[2]) for x, cols in zip(tensors, mine, strict=True)]
        for rank in range(split.size)
    ]
    received = _exchange(split, parts, shapes)
    order = split.order().to(tensors[0].device)
    return [torch.cat([of_rank[n] for of_rank in received])[order] for n in range(len(tensors))]


@dataclass(frozen=True)
class KeysAgain:
    """Keys, and maybe values, that are exchanged again when they are needed again.

    Attributes:
        split: The exchange.
        heads: Query heads.
        share: Query heads that use a key head.
        k: Keys before the exchange.
        v: Values before the exchange; None if values are kept as they are after it.
    """

    split: HeadSplit
    heads: int
    share: int
    k: torch.Tensor
    v: torch.Tensor | None

    def exchanged(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values after the exchange, of what was kept. Collective."""
        kept = [k] if self.v is None else [k, v]
        ranks = range(self.split.size)
        columns = [[self.split.groups(rank, self.heads, self.share)] * len(kept) for rank in ranks]
        got = self.split.repeated(self.heads, self.share, *_to_heads(self.split, kept, columns))
        return got[0], (v if self.v is None else got[1])

    def without_tensors(self) -> KeysAgain:
        """The same exchange; autograd holds the tensors."""
        nothing = self.k.new_empty(0)
        return replace(self, k=nothing, v=None if self.v is None else nothing)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, split: HeadSplit, share: int, *qkv: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.split, ctx.shapes = split, [x.shape for x in qkv]
        ctx.columns = [_columns(split, rank, qkv[0].shape[1], share) for rank in range(split.size)]
        return tuple(_to_heads(split, qkv, ctx.columns))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        split: HeadSplit = ctx.split
        back = split.order().argsort().to(grads[0].device)
        rows = [split.rows(rank) for rank in range(split.size)]
        by_rank = [x[back].split(rows) for x in grads]
        shapes = [
            [(rows[split.rank], len(c), s[2]) for c, s in zip(columns, ctx.shapes, strict=True)]
            for columns in ctx.columns
        ]
        parts = [[x[rank] for x in by_rank] for rank in range(split.size)]
        received = _exchange(split, parts, shapes)
        wide = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
        sums = [grads[0].new_zeros(shape, dtype=wide) for shape in ctx.shapes]
        for columns, tensors in zip(ctx.columns, received, strict=True):
            for total, cols, part in zip(sums, columns, tensors, strict=True):
                total[:, cols.start : cols.stop] += part
        return (None, None, *(x.to(grads[0].dtype) for x in sums))


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


def _columns(split: HeadSplit, rank: int, heads: int, share: int) -> list[range]:
    keys = split.groups(rank, heads, share)
    return [split.heads(rank, heads), keys, keys]
