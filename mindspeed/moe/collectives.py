"""Collectives and their reverses, for :mod:`mindspeed.moe.split_phase`.

Collectives of two groups that share one link can be chained (:class:`BusyLink`): those of one group
start when those of the other have ended, so neither takes bandwidth from the other, in both passes.

    link = Link()
    {"rows": link.chained(AllToAll(...), "ep")}
    {"rows": link.chained(GatherRows(...), "tp")}      # starts when the all-to-all has ended
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device, spmd
from mindspeed.moe.split_phase import Collective, InFlight
from mindspeed.spmd import P, R, V


@dataclass(frozen=True)
class AllToAll:
    """Rows to all ranks; the reverse brings the gradients back.

    Attributes:
        sent: rows for each rank, in order.
        received: rows from each rank, in order.
    """

    group: dist.ProcessGroup
    sent: Sequence[int]
    received: Sequence[int]

    def typed(self) -> spmd.Collective:
        """Rule for :mod:`mindspeed.spmd`."""
        return spmd.Collective(V, V, group=lambda given: self.group)

    def rows(self, rows: int) -> int:
        """Rows of the result for ``rows`` rows."""
        return sum(self.received)

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Send ``x [sum(sent), ...]``; the result is ``[sum(received), ...]``."""
        return self._exchange(x, self.sent, self.received)

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Send ``grad [sum(received), ...]``; the result is ``[sum(sent), ...]``."""
        return self._exchange(grad, self.received, self.sent)

    def _exchange(
        self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[torch.Tensor, InFlight | None]:
        out = x.new_empty((sum(received), *x.shape[1:]))
        work = dist.all_to_all_single(
            out, x.contiguous(), list(received), list(sent), group=self.group, async_op=True
        )
        return out, work


def sum_in_fp32(parts: torch.Tensor) -> torch.Tensor:
    """Sum ``parts [ranks, n, ...]`` over the ranks with one rounding: ``[n, ...]``."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    return parts.sum(0, dtype=wide).to(parts.dtype)


@dataclass(frozen=True)
class GatherRows:
    """Rows of all ranks, of each its number; the reverse sums the gradients of each rank's rows.

    Sums are exact to one rounding and equal on every backend: ranks exchange their parts, and each
    adds its own in fp32 in the order of ranks. The bytes are those of a reduce-scatter.

    Attributes:
        sizes: rows of each rank, the same on all of them.
        add: sums ``[ranks, n, ...]`` to ``[n, ...]``; :meth:`Packing.add` for packed rows.
    """

    group: dist.ProcessGroup
    sizes: Sequence[int]
    add: Callable[[torch.Tensor], torch.Tensor] = sum_in_fp32

    def typed(self) -> spmd.Collective:
        """Rule for :mod:`mindspeed.spmd`."""
        return spmd.Collective(V, R, group=lambda given: self.group)

    def rows(self, rows: int) -> int:
        """Rows of the result for ``rows`` rows."""
        return sum(self.sizes)

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Gather ``x [sizes[rank], ...]`` into ``[sum(sizes), ...]``."""
        if len(set(self.sizes)) == 1:
            return gather(x, self.group)
        # gloo and older NCCL have no uneven gather; the same bytes as one all-to-all.
        ranks = self.group.size()
        copies = x.repeat(ranks, *[1] * (x.dim() - 1))
        return AllToAll(self.group, [x.shape[0]] * ranks, self.sizes).launch(copies)

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Sum ``grad [sum(sizes), ...]`` over the ranks; each gets ``[sizes[rank], ...]``."""
        ranks, own = self.group.size(), self.sizes[self.group.rank()]
        parts, work = AllToAll(self.group, self.sizes, [own] * ranks).launch(grad)
        total = grad.new_empty((own, *grad.shape[1:]))
        return total, _Sum(parts.view(ranks, *total.shape), total, work, self.add)


@dataclass(frozen=True)
class SumRows:
    """The reverse of :class:`GatherRows`: sums over the ranks, a part of the rows for each.

    Attributes:
        sizes: rows that each rank gets, the same on all of them.
    """

    group: dist.ProcessGroup
    sizes: Sequence[int]

    def typed(self) -> spmd.Collective:
        """Rule for :mod:`mindspeed.spmd`."""
        return spmd.Collective(P, V, group=lambda given: self.group, sums=True)

    def rows(self, rows: int) -> int:
        """Rows of the result for ``rows`` rows."""
        return self.sizes[self.group.rank()]

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Sum ``x [sum(sizes), ...]`` over the ranks; each gets ``[sizes[rank], ...]``."""
        return GatherRows(self.group, self.sizes).launch_reverse(x)

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Gather ``grad [sizes[rank], ...]`` into ``[sum(sizes), ...]``."""
        return GatherRows(self.group, self.sizes).launch(grad)


class _Sum:
    """The work of an exchange of parts, and their sum."""

    def __init__(
        self,
        parts: torch.Tensor,
        total: torch.Tensor,
        work: InFlight | None,
        add: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._parts, self._total, self._work, self._add = parts, total, work, add

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._total.copy_(self._add(self._parts))


@dataclass(frozen=True)
class Gather:
    """The same number of rows from every rank; the reverse sums the gradients of each rank's."""

    group: dist.ProcessGroup

    def typed(self) -> spmd.Collective:
        """Rule for :mod:`mindspeed.spmd`."""
        return spmd.Collective(V, R, group=lambda given: self.group)

    def rows(self, rows: int) -> int:
        """Rows of the result for ``rows`` rows."""
        return rows * self.group.size()

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Gather ``x [n, ...]`` into ``[ranks n, ...]``."""
        return gather(x, self.group)

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Reduce-scatter ``grad [ranks n, ...]`` to ``[n, ...]``."""
        return reduce_scatter(grad, self.group)


@dataclass(frozen=True)
class ReduceScatter:
    """Sums of the ranks' rows, a part for each rank; the reverse gathers the gradients."""

    group: dist.ProcessGroup

    def typed(self) -> spmd.Collective:
        """Rule for :mod:`mindspeed.spmd`."""
        return spmd.Collective(P, V, group=lambda given: self.group, sums=True)

    def rows(self, rows: int) -> int:
        """Rows of the result for ``rows`` rows."""
        return rows // self.group.size()

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Reduce-scatter ``x [ranks n, ...]`` to ``[n, ...]``."""
        return reduce_scatter(x, self.group)

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Gather ``grad [n, ...]`` into ``[ranks n, ...]``."""
        return gather(grad, self.group)


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, InFlight | None]:
    """Start to gather ``x [n, ...]`` of any dtype into ``[ranks n, ...]``."""
    out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    work = dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=True)
    return out, work


def reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, InFlight | None]:
    """Start to sum ``x [ranks n, ...]`` of any dtype over the ranks; the result is ``[n, ...]``."""
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    work = dist.reduce_scatter_tensor(out, x.contiguous(), group=group, async_op=True)
    return out, work


@dataclass(eq=False)
class BusyLink:
    """The work in flight on one link.

    Attributes:
        last: the last started work by group.
    """

    last: dict[str, InFlight] = field(default_factory=dict)

    def chained(self, collective: Collective, group: str) -> Collective:
        """The same collective, which starts when those of other groups have ended."""
        return _Chained(collective, group, self)

    def start(
        self, group: str, launch: Callable[[], tuple[torch.Tensor, InFlight | None]]
    ) -> tuple[torch.Tensor, InFlight | None]:
        """Call ``launch`` for a group; returns its tensor and its work."""
        others = [work for name, work in self.last.items() if name != group]
        out, work = _after(others, launch)
        if others:
            self.last = {}  # they have ended
        if work is not None:
            self.last[group] = work
        return out, work


@dataclass(frozen=True)
class _Chained:
    collective: Collective
    group: str
    link: BusyLink

    def typed(self) -> spmd.Collective:
        return self.collective.typed()

    def rows(self, rows: int) -> int:
        """Rows of the result for ``rows`` rows."""
        return self.collective.rows(rows)

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        return self.link.start(self.group, lambda: self.collective.launch(x))

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        return self.link.start(self.group, lambda: self.collective.launch_reverse(grad))


def _after(
    others: list[InFlight], launch: Callable[[], tuple[torch.Tensor, InFlight | None]]
) -> tuple[torch.Tensor, InFlight | None]:
    """Launch when other works have ended; on devices with streams, computations do not wait."""
    here: Any = device.current()
    if not others or not here.has("streams"):
        for work in others:
            work.wait()
        return launch()
    side, before = here.stream(), here.current_stream()
    side.wait_stream(before)  # the input is ready
    with here.use_stream(side):
        for work in others:
            work.wait()
        out, started = launch()
    if out.device.type != "cpu":
        out.record_stream(before)
    return out, started
