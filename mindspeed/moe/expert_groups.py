"""Local experts in groups under expert tensor parallelism: one group computes, others communicate.

    time      0          1          2          3          4
    group 0   gather>    experts    scatter<
    group 1              gather>    experts    scatter<
    group 2                         gather>    experts    scatter<

A rank that holds slices of experts gathers the rows of all slices before the products and sums the
results after them. In D groups of experts both hide behind the products of the neighbouring groups,
except the first gather and the last sum: 2 of 2 D. In backward it is the mirror image.

The rows of an expert are in one group, in the order that they have without groups, so results and
gradients are the same to the bit. The weights stay parameters of one module
(:mod:`mindspeed.te.expert_range`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from mindspeed.moe.dispatch.all_to_all import AllToAllDispatcher
from mindspeed.moe.dispatch.device_sizes import DeviceDispatcher
from mindspeed.moe.events import EventLog
from mindspeed.moe.host_copy import HostValue
from mindspeed.moe.interpreter import Chunk, Compute, Stages, execute
from mindspeed.moe.program import Program
from mindspeed.te import kernels

GROUPS = Program.parse("[gather> gather< arrange experts disarrange scatter> scatter<]")


@dataclass(frozen=True)
class PipelinedGroups:
    """The stage ``groups`` of a layer, which takes the place of the steps from gather to scatter.

    Attributes:
        dispatcher: of the whole layer.
        count: of groups, D; divides the local experts.
    """

    dispatcher: AllToAllDispatcher
    count: int
    log: EventLog | None = None

    @property
    def size(self) -> int:
        """Experts of a group."""
        return self.dispatcher.groups.local // self.count

    def stage(self, experts: Compute) -> Compute:
        """The stage.

        Args:
            experts: computes the local experts from ``values["first"]`` on, ``size`` of them.
        """
        groups = self.dispatcher.groups
        one = replace(groups, experts=groups.ep.size() * self.size)
        stages = replace(self.dispatcher, groups=one).stages()
        inner = replace(stages, compute={**stages.compute, "experts": experts})

        def compute(chunk: Chunk) -> None:
            self._compute(chunk, inner)

        return compute

    def _compute(self, chunk: Chunk, stages: Stages) -> None:
        parts = self._cut(chunk)
        execute(GROUPS, stages, parts, self.log)
        rows = torch.cat([part.tensors["rows"] for part in parts])
        chunk.tensors["rows"] = self._joined(chunk, rows)
        chunk.tensors.pop("row_probs", None)

    def _joined(self, chunk: Chunk, rows: torch.Tensor) -> torch.Tensor:
        """The results ``rows [m, h]`` of all groups in the order in which the rows came."""
        (ordered,) = self._sorted((rows,), self._sizes(chunk).t())
        return ordered

    def _cut(self, chunk: Chunk) -> list[Chunk]:
        """A chunk for each group, with the rows that this rank received for its experts."""
        sizes = self._sizes(chunk)  # [ep, D]
        names = self.dispatcher.carried(chunk)
        tensors = self._sorted(tuple(chunk.tensors[name] for name in names), sizes)
        cut = [x.split(sizes.sum(0).tolist()) for x in tensors]
        found = []
        for i in range(self.count):
            part = Chunk(i, {name: parts[i] for name, parts in zip(names, cut, strict=True)})
            part.values |= {
                "first": i * self.size,
                "packing": chunk.values["packing"],
                "host_counts": HostValue(partial(self._of_group, chunk, i)),
            }
            found.append(part)
        return found

    def _of_group(self, chunk: Chunk, group: int) -> torch.Tensor:
        """Rows of every rank for every expert of a group, ``[ranks, ep size]``."""
        return self._counts(chunk)[:, :, group].flatten(1)

    def _counts(self, chunk: Chunk) -> torch.Tensor:
        """Rows of every rank for every expert, ``[ranks, ep, D, size]``."""
        counts: torch.Tensor = chunk.values["host_counts"].get()
        ranks = self.dispatcher.groups.tp_ep.size()
        return counts.view(ranks, -1, self.count, self.size)

    def _sizes(self, chunk: Chunk) -> torch.Tensor:
        """Rows that this rank received from each rank for each group, ``[ep, D]``."""
        groups = self.dispatcher.groups
        own = self._counts(chunk)[:, groups.ep.rank()].unflatten(0, (-1, groups.tp.size()))
        return own[:, groups.tp.rank()].sum(-1)

    def _sorted(
        self, tensors: tuple[torch.Tensor, ...], sizes: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Rows ``[m, ...]`` in pieces of ``sizes [a, b]``, rearranged to pieces ``[b, a]``."""
        if 1 in sizes.shape:
            return tensors
        order = torch.arange(sizes.numel()).view(sizes.shape).t().reshape(-1)
        return kernels.moe_sort_chunks(tensors, sizes.reshape(-1), order)


@dataclass(frozen=True)
class BoundedGroups(PipelinedGroups):
    """The same where only the device knows sizes: equal blocks for each rank and group."""

    dispatcher: DeviceDispatcher

    def _cut(self, chunk: Chunk) -> list[Chunk]:
        """A chunk for each group, with its block of every rank."""
        tensors, groups = chunk.tensors, self.dispatcher.groups
        counts = tensors.pop("counts").view(groups.tp_ep.size(), -1, self.count, self.size)
        found = []
        for i in range(self.count):
            part = Chunk(i, {name: self._blocks(tensors[name])[:, i].flatten(0, 1)
                             for name in self.dispatcher.carried(chunk)})  # fmt: skip
            part.tensors["counts"] = counts[:, :, i].reshape(-1)
            shared = ("packing", "bound")
            part.values |= {name: chunk.values[name] for name in shared} | {"first": i * self.size}
            found.append(part)
        return found

    def _joined(self, chunk: Chunk, rows: torch.Tensor) -> torch.Tensor:
        ranks = self.dispatcher.groups.ep.size()
        blocks = rows.view(self.count, ranks, chunk.values["bound"], *rows.shape[1:])
        return blocks.transpose(0, 1).flatten(0, 2)

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows [R D C, ...]`` as ``[R, D, C, ...]``."""
        return rows.view(self.dispatcher.groups.ep.size(), self.count, -1, *rows.shape[1:])
