"""Query rows of a chunk, and their keys and values, gathered from context-parallel ranks.

    rank r of t tensor-parallel ranks holds rows [r S/t, (r + 1) S/t) of a sequence
    chunk c of D: of every rank's rows the c-th part, t blocks of S / (t D) rows

The reduce-scatter after attention then gives each rank exactly its c-th part, in order: no row
changes its rank, and residuals, positions and labels stay where they are. A block of rows sees the
keys up to its own end only, so a later chunk computes more than an earlier one, and attention
``S^2 (D t + 1) / (2 D t)`` scores instead of ``S^2`` on backends that do not skip masked ones.

Rank r of P context-parallel ranks holds chunks r and 2 P - 1 - r of 2 P (zigzag); keys and values
of all ranks are gathered once for a layer, in the order of the sequence. A block of a rank's rows
lies in one of its two chunks, so it sees the keys up to its own end here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.moe.collectives import Gather
from mindspeed.moe.split_phase import Ticket, finish, start
from mindspeed.spmd import Passes, Token, typed


def blocks(length: int, chunks: int, ranks: int) -> list[list[tuple[int, int]]]:
    """Blocks of rows of each chunk, (start, end), one for each rank.

    Args:
        length: S.
        chunks: D.
        ranks: t.

    Raises:
        ValueError: the rows cannot be shared evenly.
    """
    size, rest = divmod(length, chunks * ranks)
    if rest or not size:
        raise ValueError(
            f"{length} rows cannot be cut into {chunks} chunks on {ranks} tensor-parallel ranks"
        )
    return [
        [(start, start + size) for start in range(c * size, length, chunks * size)]
        for c in range(chunks)
    ]


class Prefixes:
    """The first rows of a tensor, many times; their gradients are added up in fp32.

    Autograd would pad each gradient to the whole tensor, and add in its dtype.

    Args:
        x: ``[s, ...]``, any floating dtype.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._x, self._sum = x, _Sum(x.shape, x.dtype)
        self._token = _Collect.apply(x, self._sum) if x.requires_grad else None

    def first(self, rows: int) -> torch.Tensor:
        """``x[:rows]``."""
        if self._token is None or not torch.is_grad_enabled():
            return self._x[:rows]
        return _First.apply(self._token, self._x.detach(), rows, self._sum)  # type: ignore[no-any-return]


class _Sum:
    """The sum of gradients; what autograd keeps alive, so it knows no tensor of the graph."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self._sum: torch.Tensor | None = None

    def add(self, grad: torch.Tensor) -> None:
        if self._sum is None:
            wide = torch.promote_types(grad.dtype, torch.float32)
            self._sum = torch.zeros(self._shape, dtype=wide, device=grad.device)
        self._sum[: grad.shape[0]] += grad

    def take(self) -> torch.Tensor | None:
        found, self._sum = self._sum, None
        return None if found is None else found.to(self._dtype)


@typed(Token())
class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, total: _Sum) -> torch.Tensor:
        ctx.total = total
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return ctx.total.take(), None


@typed(Passes("x"))
class _First(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, x: torch.Tensor, rows: int, total: _Sum
    ) -> torch.Tensor:
        ctx.total, ctx.like = total, token.new_zeros(())
        return x[:rows]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.total.add(grads[0])
        return ctx.like, None, None, None


_GROUPS = ("cp_group", "cp_groups")  # of the core attention of either layer spec


@dataclass(frozen=True)
class ContextRows:
    group: dist.ProcessGroup

    def gathered(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' rows of each tensor ``[s, ...]`` in the order of the sequence, ``[P s, ...]``.

        The reverse sums the gradients of all ranks.
        """
        tickets = [Ticket(Gather(self.group)) for _ in tensors]
        started = [start(x, ticket) for x, ticket in zip(tensors, tickets, strict=True)]
        return [self._ordered(finish(x, t)) for x, t in zip(started, tickets, strict=True)]

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        chunks = x.view(self.group.size(), 2, -1, *x.shape[1:])
        return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)

    def end(self, end: int, rows: int) -> int:
        """Position in the sequence of ``end``, the end of a block in this rank's ``rows``."""
        half, (rank, size) = rows // 2, (self.group.rank(), self.group.size())
        chunk, before = (rank, 0) if end <= half else (2 * size - 1 - rank, half)
        return chunk * half + end - before


@contextmanager
def alone(core_attention: Any) -> Iterator[None]:
    """Hide its context-parallel ranks from a core attention inside the block."""
    known = {name: vars(core_attention)[name] for name in _GROUPS if name in vars(core_attention)}
    for name in known:
        setattr(core_attention, name, None)
    try:
        yield
    finally:
        for name, group in known.items():
            setattr(core_attention, name, group)
