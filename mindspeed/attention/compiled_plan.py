"""A plan compiled for one rank: positions become rows of buffers, regions become operator calls.

Compiled once per plan, rank and pass (:mod:`~mindspeed.attention.plan_compiler`), then executed for
every layer (:mod:`~mindspeed.attention.executor`). Buffers are numbered as in
:class:`~mindspeed.attention.plan.Transfer`.

Indices of rows are built before the tensor exists: adjacent rows become one slice, which selects a
view; other rows become an index tensor, which is copied to each device once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from mindspeed.attention.communication import RowCounts
from mindspeed.attention.plan import OWN
from mindspeed.attention.varlen_batches import VarlenBatch
from mindspeed.device.host_tensors import with_values


class RowIndex:
    """Rows of a tensor, in the order in which they are selected.

    No row may occur twice where rows are written (:meth:`add_to`, :meth:`copy_to`).

    Attributes:
        slices: The rows as slices; adjacent ones are joined.
        rows: Number of rows.
    """

    def __init__(self, slices: Iterable[slice]) -> None:
        self.slices: list[slice] = []
        for part in slices:
            if self.slices and self.slices[-1].stop == part.start:
                self.slices[-1] = slice(self.slices[-1].start, part.stop)
            elif part.stop > part.start:
                self.slices.append(part)
        self.rows = sum(part.stop - part.start for part in self.slices)
        self._on: dict[torch.device, torch.Tensor] = {}

    @property
    def as_slice(self) -> slice | None:
        """The rows as one slice; None if they are not contiguous."""
        if not self.slices:
            return slice(0, 0)
        return self.slices[0] if len(self.slices) == 1 else None

    def overlaps(self, other: RowIndex) -> bool:
        """Whether both contain the same row."""
        starts = sorted((part.start, part.stop) for part in (*self.slices, *other.slices))
        return any(a[1] > b[0] for a, b in itertools.pairwise(starts))

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """``[self.rows, ...]`` from ``[rows, ...]``, any dtype; a view if contiguous."""
        where = self.as_slice
        return x.index_select(0, self.tensor(x.device)) if where is None else x[where]

    def add_to(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """Add ``part`` ``[self.rows, ...]`` to these rows of ``x``, in place and in x's dtype."""
        if (where := self.as_slice) is None:
            x.index_add_(0, self.tensor(x.device), part.to(x.dtype))
        else:
            x[where] += part

    def copy_to(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """Overwrite these rows of ``x`` in place; ``part [self.rows, ...]`` has its dtype."""
        if (where := self.as_slice) is None:
            x.index_copy_(0, self.tensor(x.device), part)
        else:
            x[where].copy_(part)

    @with_values
    def tensor(self, device: torch.device) -> torch.Tensor:
        """The row numbers, ``[self.rows]`` int64 on ``device``."""
        if device not in self._on:
            parts = [torch.arange(part.start, part.stop) for part in self.slices]
            self._on[device] = torch.cat(parts).to(device, non_blocking=True)
        return self._on[device]


Direction = Literal["forward", "backward"]

ZEROS = -(1 << 30)
"""Buffer of gradients to which this rank has not added anything."""


@dataclass(frozen=True)
class RankExchange:
    """One rank's part of the transfers of a stage.

    Attributes:
        tag: See :class:`mindspeed.attention.communication.Exchange`.
        collective: All ranks take part in one collective.
        buffer: Buffer that is sent from.
        send_rows: Rows of it, destination by destination.
        sends: Destinations and their numbers of rows.
        receives: Sources and their numbers of rows.
        send_rows_by_peer: ``send_rows``, split by destination.
    """

    tag: int
    collective: bool
    buffer: int
    send_rows: RowIndex
    sends: RowCounts
    receives: RowCounts
    send_rows_by_peer: tuple[RowIndex, ...]

    def reversed(self, tag: int) -> RankExchange:
        """Send back results for what was received."""
        return replace(self, tag=tag, sends=self.receives, receives=self.sends)


@dataclass(frozen=True)
class VarlenCall:
    """One call of the attention operator.

    Attributes:
        batch: Its sequences.
        queries: Buffer of its queries: ``OWN``, or ``0`` for those received in this stage.
        q_rows: Rows of the queries.
        keys: Buffer of its keys and values.
        k_rows: Rows of the keys and values.
        first: No earlier call has computed outputs of these queries, so nothing is merged.
    """

    batch: VarlenBatch
    queries: int
    q_rows: RowIndex
    keys: int
    k_rows: RowIndex
    first: bool = False


@dataclass
class RankStage:
    """A stage of one rank.

    Attributes:
        kv: Exchange of keys and values, before the calls.
        q: Exchange of queries, before the calls; results return after them.
        saved_keys: Buffer of the keys where only values arrive.
        starts: Stages whose exchanges are started at the start of this one.
        calls: Operator calls.
        dkv: Exchange of gradients of keys and values, after the calls.
        dkv_targets: Buffer and rows to which each received gradient is added.
        frees: Buffers whose last use is in this stage.
    """

    kv: RankExchange | None = None
    q: RankExchange | None = None
    saved_keys: int | None = None
    starts: tuple[int, ...] = ()
    calls: tuple[VarlenCall, ...] = ()
    dkv: RankExchange | None = None
    dkv_targets: tuple[tuple[int, RowIndex], ...] = ()
    frees: tuple[int, ...] = ()


@dataclass
class CompiledPlan:
    """One pass of one rank.

    Attributes:
        stages: In order.
        gradient_rows: Number of rows of every buffer in which dkv is accumulated.
    """

    stages: list[RankStage]
    gradient_rows: dict[int, int] = field(default_factory=dict)

    @property
    def single_call(self) -> VarlenCall | None:
        """The call over all own rows that is the whole pass; None if there is more to do."""
        if len(self.stages) > 1 or len(self.stages[0].calls) != 1:
            return None
        (call,) = self.stages[0].calls
        all_rows = slice(0, self.gradient_rows[OWN])
        return call if call.q_rows.as_slice == call.k_rows.as_slice == all_rows else None
