"""Rows of a sequence that context-parallel ranks share, for attention in chunks.

    rank r of P holds chunks r and 2 P - 1 - r of 2 P (zigzag)
    keys and values of all ranks are gathered once for a layer, in the order of the sequence

A block of a rank's rows lies in one of its two chunks, so it sees the keys up to its own end, as
without context parallelism (:mod:`mindspeed.moe.ampipe.rows`).
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

_GROUPS = ("cp_group", "cp_groups")  # of the core attention of either layer spec


@dataclass(frozen=True)
class ContextRows:
    """The rows of one rank.

    Attributes:
        group: context-parallel ranks.
    """

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
        """Where in the sequence a block of this rank's ``rows`` ends that ends at ``end`` here."""
        half, (rank, size) = rows // 2, (self.group.rank(), self.group.size())
        chunk, before = (rank, 0) if end <= half else (2 * size - 1 - rank, half)
        return chunk * half + end - before


@contextmanager
def alone(core_attention: Any) -> Iterator[None]:
    """Inside, a core attention does not know its context-parallel ranks."""
    known = {name: vars(core_attention)[name] for name in _GROUPS if name in vars(core_attention)}
    for name in known:
        setattr(core_attention, name, None)
    try:
        yield
    finally:
        for name, group in known.items():
            setattr(core_attention, name, group)
