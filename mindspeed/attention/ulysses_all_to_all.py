"""Ulysses all-to-all: from all heads of some tokens to some heads of all tokens, and back.

Before it, a rank has its rows and all heads; after it, the rows of all ranks of the group, by
ascending position, and its share of the heads. q, k and v of one destination are sent in one
message: one all-to-all before the attention, one after it. A key head is sent once to every rank
with a query head that uses it. The number of heads need not be a multiple of the ranks: rank i of U
gets heads ``n i // U`` to ``n (i + 1) // U``.

Bytes sent by a rank, in forward and in backward: ``(U - 1) / U * (2 Q + KV')``, where KV' counts a
key head as often as it is sent. With fewer key heads g than ranks, keys and values need U / g times
the memory after the all-to-all; :meth:`HeadAllToAll.kv_cache` saves them as they were before it,
for ``(U - 1) / U KV'`` more bytes in backward.

Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention.planners.kv_cache import POLICIES
from mindspeed.attention.sequence_sharding import SequenceSharding
from mindspeed.device.host_tensors import with_values
from mindspeed.errors import ConfigError
from mindspeed.spmd import Collective, V, typed


@dataclass(frozen=True)
class HeadAllToAll:
    """The all-to-all among the ranks of a group.

    Attributes:
        sharding: The positions of its ranks.
        rank: This rank in the group.
    """

    sharding: SequenceSharding
    rank: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.sharding.ranks

    def heads(self, rank: int, heads: int) -> range:
        """Query heads of a rank after the all-to-all."""
        return range(heads * rank // self.size, heads * (rank + 1) // self.size)

    def key_heads(self, rank: int, heads: int, share: int) -> range:
        """Key heads that the query heads of a rank use; ``share`` of them use the same one."""
        own = self.heads(rank, heads)
        return range(own.start // share, (own.stop - 1) // share + 1) if own else range(0)

    def balance(self, heads: int) -> float:
        """Mean over largest number of heads of a rank; 1 is perfect."""
        return heads / self.size / max(len(self.heads(rank, heads)) for rank in range(self.size))

    def to_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, share: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange own rows of all heads for all rows of own heads. Collective.

        Key heads are repeated where the query heads of a rank use them unequally often.

        Args:
            q: Queries ``[t, n, d]``, any dtype; k and v have the same.
            k: Keys ``[t, g, d]``.
            v: Values ``[t, g, d_v]``.
            share: Query heads per key head; by default ``n / g``.

        Returns:
            ``[T, n', d]``, ``[T, g', d]`` and ``[T, g', d_v]``, by ascending position.
        """
        heads = q.shape[1]
        share = heads // k.shape[1] if share is None else share
        q, k, v = _ToHeads.apply(self, share, q, k, v)
        k, v = self.repeated(heads, share, k, v)
        return q, k, v

    def repeated(self, heads: int, share: int, *keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Repeat key heads where query heads use them unequally often: one per query head.

        ``keys`` are ``[T, g', d]`` of any dtype; the results ``[T, n', d]``, or the same tensors.
        """
        first = self.key_heads(self.rank, heads, share).start
        used = [head // share - first for head in self.heads(self.rank, heads)]
        if len({used.count(group) for group in used}) <= 1:
            return keys
        index = torch.tensor(used, device=keys[0].device)
        return tuple(x.index_select(1, index) for x in keys)

    def kv_cache(
        self, heads: int, k: torch.Tensor, v: torch.Tensor, policy: str, share: int | None = None
    ) -> KVBeforeAllToAll:
        """Save keys and values for backward as they are before the all-to-all.

        Args:
            heads: Query heads, n.
            k: Keys ``[t, g, d]``, any dtype.
            v: Values ``[t, g, d_v]``, dtype of k.
            policy: ``full`` for both, ``half`` for the keys only.
            share: As in :meth:`to_heads`.

        Raises:
            ConfigError: Unknown policy, or the all-to-all repeats no key head, so that this would
                not save memory.
        """
        if policy not in POLICIES:
            raise ConfigError(f"ulysses: KV cache policy {policy!r} is not one of full, half")
        share = heads // k.shape[1] if share is None else share
        sent = sum(len(self.key_heads(rank, heads, share)) for rank in range(self.size))
        if sent <= k.shape[1]:
            raise ConfigError(
                f"ulysses: KV cache policy {policy!r} keeps keys before the all-to-all, which "
                f"saves memory only where it repeats key heads; n_kv={k.shape[1]} over "
                f"CP={self.size} repeats none"
            )
        values = v.detach() if policy == "full" else None
        return KVBeforeAllToAll(self, heads, share, k.detach(), values)

    def to_sequence(self, out: torch.Tensor, heads: int) -> torch.Tensor:
        """Exchange all rows of own heads ``[T, n', d_v]`` for ``[t, n, d_v]``. Collective."""
        return _ToSequence.apply(self, out, heads)  # type: ignore[no-any-return]

    def order(self) -> torch.Tensor:
        """``[T]`` int64: for each position, its row in the concatenation of the ranks' rows."""
        return _order(self.sharding)

    def rows(self, rank: int) -> int:
        """Number of rows of a rank before the all-to-all."""
        return sum(b - a for a, b in self.sharding.segments[rank])


@functools.lru_cache(maxsize=64)  # the same for every layer and step
@with_values
def _order(sharding: SequenceSharding) -> torch.Tensor:
    return torch.cat([sharding.positions(rank) for rank in range(sharding.ranks)]).argsort()


def _all_to_all(
    exchange: HeadAllToAll,
    parts: list[list[torch.Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
) -> list[list[torch.Tensor]]:
    """Send ``parts[j]`` to rank j and receive tensors of ``shapes[i]`` from rank i."""
    sent = [torch.cat([x.reshape(-1) for x in tensors]) for tensors in parts]
    sizes = [[torch.Size(shape).numel() for shape in wanted] for wanted in shapes]
    received = sent[0].new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(
        received, torch.cat(sent), [sum(size) for size in sizes], [len(x) for x in sent],
        group=exchange.group,
    )  # fmt: skip
    flat = iter(received.split([n for size in sizes for n in size]))
    return [[next(flat).view(shape) for shape in wanted] for wanted in shapes]


def _to_heads(
    exchange: HeadAllToAll, tensors: Sequence[torch.Tensor], columns: Sequence[Sequence[range]]
) -> list[torch.Tensor]:
    """Send heads ``columns[rank]`` to every rank; returns own heads of all rows, ascending."""
    parts = [
        [x[:, cols.start : cols.stop] for x, cols in zip(tensors, of_rank, strict=True)]
        for of_rank in columns
    ]
    mine = columns[exchange.rank]
    shapes = [
        [
            (exchange.rows(rank), len(cols), x.shape[2])
            for x, cols in zip(tensors, mine, strict=True)
        ]
        for rank in range(exchange.size)
    ]
    received = _all_to_all(exchange, parts, shapes)
    order = exchange.order().to(tensors[0].device)
    return [torch.cat([of_rank[n] for of_rank in received])[order] for n in range(len(tensors))]


@dataclass(frozen=True)
class KVBeforeAllToAll:
    """Keys, and maybe values, saved before the all-to-all, which is repeated in backward.

    Attributes:
        heads: Query heads, n.
        share: Query heads per key head.
        k: Keys ``[t, g, d]``.
        v: Values ``[t, g, d_v]``; None if values are saved as they are after the all-to-all.
    """

    exchange: HeadAllToAll
    heads: int
    share: int
    k: torch.Tensor
    v: torch.Tensor | None

    def after_all_to_all(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values after the all-to-all, of those saved before it. Collective.

        Args:
            k: Saved keys ``[t, g, d]`` of this rank's tokens, all heads.
            v: Saved values ``[t, g, d_v]``; if :attr:`v` is None, those after the all-to-all.

        Returns:
            ``[T, g', d]`` and ``[T, g', d_v]``: all tokens of the group, the key heads that this
            rank's query heads use; dtypes of the arguments.
        """
        saved = [k] if self.v is None else [k, v]
        ranks = range(self.exchange.size)
        columns = [
            [self.exchange.key_heads(rank, self.heads, self.share)] * len(saved) for rank in ranks
        ]
        got = self.exchange.repeated(
            self.heads, self.share, *_to_heads(self.exchange, saved, columns)
        )
        return got[0], (v if self.v is None else got[1])

    def without_tensors(self) -> KVBeforeAllToAll:
        """The same without the tensors, which autograd holds."""
        nothing = self.k.new_empty(0)
        return replace(self, k=nothing, v=None if self.v is None else nothing)


@typed(Collective(V, V, tensor="qkv", group=lambda given: given["exchange"].group))
class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: HeadAllToAll, share: int, *qkv: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.shapes = exchange, [x.shape for x in qkv]
        ctx.columns = [
            _columns(exchange, rank, qkv[0].shape[1], share) for rank in range(exchange.size)
        ]
        return tuple(_to_heads(exchange, qkv, ctx.columns))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange: HeadAllToAll = ctx.exchange
        back = exchange.order().argsort().to(grads[0].device)
        rows = [exchange.rows(rank) for rank in range(exchange.size)]
        by_rank = [x[back].split(rows) for x in grads]
        shapes = [
            [(rows[exchange.rank], len(c), s[2]) for c, s in zip(columns, ctx.shapes, strict=True)]
            for columns in ctx.columns
        ]
        parts = [[x[rank] for x in by_rank] for rank in range(exchange.size)]
        received = _all_to_all(exchange, parts, shapes)
        wide = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
        sums = [grads[0].new_zeros(shape, dtype=wide) for shape in ctx.shapes]
        for columns, tensors in zip(ctx.columns, received, strict=True):
            for total, cols, part in zip(sums, columns, tensors, strict=True):
                total[:, cols.start : cols.stop] += part
        return (None, None, *(x.to(grads[0].dtype) for x in sums))


@typed(Collective(V, V, tensor="out", group=lambda given: given["exchange"].group))
class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadAllToAll, out: torch.Tensor, heads: int) -> torch.Tensor:
        ctx.exchange, ctx.heads = exchange, heads
        rows = [exchange.rows(rank) for rank in range(exchange.size)]
        parts = [[x] for x in out[exchange.order().argsort().to(out.device)].split(rows)]
        shapes = [
            [(rows[exchange.rank], len(exchange.heads(rank, heads)), out.shape[2])]
            for rank in range(exchange.size)
        ]
        return torch.cat([x for (x,) in _all_to_all(exchange, parts, shapes)], 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange, heads = ctx.exchange, ctx.heads
        dout = grads[0]
        ranges = [exchange.heads(rank, heads) for rank in range(exchange.size)]
        parts = [[dout[:, r.start : r.stop]] for r in ranges]
        mine = len(ranges[exchange.rank])
        shapes = [[(exchange.rows(rank), mine, dout.shape[2])] for rank in range(exchange.size)]
        received = torch.cat([x for (x,) in _all_to_all(exchange, parts, shapes)])
        return None, received[exchange.order().to(dout.device)], None


def _columns(exchange: HeadAllToAll, rank: int, heads: int, share: int) -> list[range]:
    keys = exchange.key_heads(rank, heads, share)
    return [exchange.heads(rank, heads), keys, keys]
