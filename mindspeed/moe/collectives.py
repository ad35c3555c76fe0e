"""Collectives and their reverses, for :mod:`mindspeed.moe.split_phase`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed.moe.split_phase import Work


@dataclass(frozen=True)
class AllToAll:
    """Rows to all ranks; the reverse brings the gradients back.

    Attributes:
        group: of all ranks that take part.
        sent: rows for each rank, in order.
        received: rows from each rank, in order.
    """

    group: dist.ProcessGroup
    sent: Sequence[int]
    received: Sequence[int]

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, Work | None]:
        """Send ``x [sum(sent), ...]``; the result is ``[sum(received), ...]``."""
        return self._exchange(x, self.sent, self.received)

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, Work | None]:
        """Send ``grad [sum(received), ...]``; the result is ``[sum(sent), ...]``."""
        return self._exchange(grad, self.received, self.sent)

    def _exchange(
        self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[torch.Tensor, Work | None]:
        out = x.new_empty((sum(received), *x.shape[1:]))
        work = dist.all_to_all_single(
            out, x.contiguous(), list(received), list(sent), group=self.group, async_op=True
        )
        return out, work


@dataclass(frozen=True)
class Gather:
    """The same number of rows from every rank; the reverse sums the gradients of each rank's."""

    group: dist.ProcessGroup

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, Work | None]:
        """Gather ``x [n, ...]`` into ``[ranks n, ...]``."""
        return gather(x, self.group)

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, Work | None]:
        """Reduce-scatter ``grad [ranks n, ...]`` to ``[n, ...]``."""
        return reduce_scatter(grad, self.group)


@dataclass(frozen=True)
class ReduceScatter:
    """Sums of the ranks' rows, a part for each rank; the reverse gathers the gradients."""

    group: dist.ProcessGroup

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, Work | None]:
        """Reduce-scatter ``x [ranks n, ...]`` to ``[n, ...]``."""
        return reduce_scatter(x, self.group)

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, Work | None]:
        """Gather ``grad [n, ...]`` into ``[ranks n, ...]``."""
        return gather(grad, self.group)


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Work | None]:
    """Start to gather ``x [n, ...]`` of any dtype into ``[ranks n, ...]``."""
    out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    work = dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=True)
    return out, work


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Work | None]:
    """Start to sum ``x [ranks n, ...]`` of any dtype over the ranks; the result is ``[n, ...]``."""
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    work = dist.reduce_scatter_tensor(out, x.contiguous(), group=group, async_op=True)
    return out, work
