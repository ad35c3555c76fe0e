"""All-to-all without a size on the host: buffers of a bound, whose fill stays on the device.

    count      how many rows are for each expert, to the rank of the experts
    permute    the rows for each rank, sorted by expert and by token
    dispatch   to the ranks of the experts, as :mod:`mindspeed.moe.row_exchange` says
    gather     buffers of the ranks with the other slices of the experts
    arrange    rows by local expert, those of nobody last
    disarrange the inverse
    scatter    the sum of the slices' results, for the rows of this rank's buffer
    combine    back
    unpermute  the sum of the rows of each token

The program is that of the all-to-all dispatcher. Nothing depends on a value of the routing but
values: no copy of counts to the host, no wait for the device, static shapes. Rows beyond the bound
(:mod:`mindspeed.moe.device_bound`) are left out and noted. Experts get their sizes as
:class:`mindspeed.te.device_groups.DeviceSizes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mindspeed.moe.collectives import AllToAll, Gather, GatherRows
from mindspeed.moe.device_bound import DeviceBound
from mindspeed.moe.dispatch.all_to_all import ExpertGroups
from mindspeed.moe.dispatch.padded import PaddedDispatcher, Slots, select_rows
from mindspeed.moe.interpreter import Chunk
from mindspeed.moe.program import Program
from mindspeed.moe.request import LayerRequest, program_of
from mindspeed.moe.row_exchange import DeviceRows, RowExchange
from mindspeed.moe.save.refetch import Local, Steps
from mindspeed.moe.split_phase import Collective
from mindspeed.te.device_groups import DeviceSizes


def program(request: LayerRequest) -> Program:
    """The program of the all-to-all dispatcher; experts in pieces need no counts."""
    whole = program_of(request)
    return whole.without("count") if request.pipe_slices else whole


@dataclass(frozen=True)
class BoundedExperts(PaddedDispatcher):
    """Blocks of a bound, one for each expert of every rank; rows of nobody are zero.

    For experts that are sent and computed one by one (:mod:`mindspeed.moe.pipe_experts`).

    Attributes:
        bound: of the rows.
    """

    bound: DeviceBound = field(kw_only=True)

    @classmethod
    def of(cls, groups: ExpertGroups, width: int, bound: DeviceBound) -> BoundedExperts:
        """Make it of the bound of all layers."""

        def capacity(tokens: int) -> int:
            return bound.rows(tokens, width, groups.experts, 1)

        return cls(groups, width, capacity=capacity, bound=bound)

    def note(self, layer: int, routing_map: torch.Tensor) -> None:
        """Remember whether an expert has too many rows of ``routing_map [n, E]``."""
        rows, most = routing_map.sum(0), self.capacity(routing_map.shape[0])
        self.bound.note(layer, (rows > most).any())


@dataclass(frozen=True)
class DeviceDispatcher(PaddedDispatcher):
    """The stages; see the module's documentation.

    Attributes:
        bound: of the rows.
        exchange: how they travel.
        parts: groups of a rank's experts whose rows have a bound, and a block, of their own.
    """

    bound: DeviceBound = field(kw_only=True)
    exchange: RowExchange = field(kw_only=True)
    parts: int = field(default=1, kw_only=True)

    def count(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Rows of this rank for each expert, int64 ``[E]``, to the experts' ranks.

        All ranks get those of all where experts are cut in slices: each has the others' rows, too.
        """
        groups, routing_map = self.groups, chunk.tensors["routing_map"]
        ranks, local, tokens = groups.ep.size(), groups.local, routing_map.shape[0]
        counts, bound = self.counted(chunk), chunk.values["bound"]
        before = counts.cumsum(1) - counts  # among those for the rank, or its group of experts
        kept = torch.minimum(counts, (bound - before).clamp(min=0))
        blocks, width = kept.shape
        length = self.exchange.send_length(bound, blocks, tokens * self.width)
        sizes = self._group_sizes(kept, bound)
        first = (sizes.cumsum(0) - sizes).view(blocks, width + 1)[:, :width].reshape(-1)
        place = routing_map.cumsum(0) - 1
        place = torch.where(place < kept.view(-1), place + first, -1)
        chunk.values["slots"] = Slots.in_blocks(
            routing_map, place, self.width, groups.experts, length
        )
        chunk.values["sent"] = kept.view(ranks, -1).sum(1)
        chunk.tensors["counts"] = kept.view(-1)
        if groups.tp.size() > 1:
            return {"counts": Gather(groups.tp_ep)}
        equal = AllToAll(groups.ep, [local] * ranks, [local] * ranks)
        return {"counts": equal} if ranks > 1 else {}

    def counted(self, chunk: Chunk) -> torch.Tensor:
        """Rows of this rank for each expert, ``[blocks, experts]``; too many are noted."""
        blocks, routing_map = self.groups.ep.size() * self.parts, chunk.tensors["routing_map"]
        counts = routing_map.sum(0).view(blocks, -1)
        bound = self.bound.rows(routing_map.shape[0], self.width, blocks, counts.shape[1])
        self.bound.note(chunk.values.get("layer", 0), (counts.sum(1) > bound).any())
        chunk.values["bound"] = bound
        return counts

    def dispatch(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Rows and probabilities to the ranks of their experts."""
        ranks, bound = self.groups.ep.size(), self.parts * chunk.values["bound"]
        if ranks == 1:
            return {}
        chunk.values["moved"] = DeviceRows(
            self.groups.ep,
            bound,
            sent=chunk.values["sent"],
            received=self._received(chunk.tensors["counts"])[self.groups.tp.rank()].sum(1),
            send_length=chunk.values["slots"].capacity,
            receive_length=ranks * bound,
        )
        return self._carry(chunk, self.exchange.collective(chunk.values["moved"]))

    def arrange(self, chunk: Chunk) -> None:
        """``rows [t R C, h]`` by local expert; sizes are on the device."""
        tensors, (order, inverse) = chunk.tensors, self._order(chunk)
        tensors["rows"] = select_rows(tensors["rows"], order, inverse)
        if (packing := chunk.values["packing"]) is None:
            probs = select_rows(tensors["row_probs"].unsqueeze(1), order, inverse)
            tensors["row_probs"] = probs.squeeze(1)
        else:
            tensors["rows"], tensors["row_probs"] = packing.unpack(tensors["rows"])

    def disarrange(self, chunk: Chunk) -> None:
        """The order in which the rows came."""
        order, inverse = chunk.values["order"]
        chunk.tensors["rows"] = select_rows(chunk.tensors["rows"], inverse, order)

    def combine(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Results to the ranks of their tokens."""
        if self.groups.ep.size() == 1:
            return {}
        back = self.exchange.collective(chunk.values["moved"].back())
        return {"rows": self.groups.wire.results(back)}

    def repeat(self, chunk: Chunk) -> Steps:
        """Dispatch ``hidden [n, h]`` to experts' ``rows [m, h]`` again, without probabilities."""
        order, inverse = chunk.values["order"]
        arrange = lambda rows: select_rows(rows, order, inverse)  # noqa: E731
        steps: list[Local | Collective] = [self._permute_again(chunk, 0)]
        if self.groups.ep.size() > 1:
            again = self.exchange.collective(chunk.values["moved"])
            steps.append(self.groups.wire.tokens(again))
        if self.groups.tp.size() > 1:
            slices = GatherRows(self.groups.tp, self._slice_rows(chunk))
            steps.append(self.groups.wire.tokens(slices))
        return [*steps, arrange]

    def _order(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """The slot of each row by expert, and the row of each slot, int64 ``[t R C, 1]`` each."""
        local, bound = self.groups.local, chunk.values["bound"]
        counts = self._received(chunk.tensors.pop("counts"))
        slices, ranks, _ = counts.shape
        sizes = self._group_sizes(counts.flatten(0, 1), bound).view(slices, -1)
        rest = ranks * bound - sizes.sum(1, keepdim=True)  # behind the last row of a buffer
        ends = torch.cat([sizes, rest], 1).view(-1).cumsum(0)
        slot = torch.arange(slices * ranks * bound, device=counts.device)
        group = torch.searchsorted(ends, slot, right=True) % (sizes.shape[1] + 1)
        # The last group of each rank is nobody's, and so is the rest.
        expert = torch.where(group < sizes.shape[1], group % (local + 1), local)
        order = torch.argsort(expert, stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, slot)
        chunk.values["order"] = found = order.unsqueeze(1), inverse.unsqueeze(1)
        chunk.values["tokens_per_expert"] = DeviceSizes.of(counts.sum((0, 1)), len(slot))
        return found

    def _received(self, counts: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's experts by slice and source, int64 ``[t, R, experts of a rank]``."""
        groups = self.groups
        slices, ranks = groups.tp.size(), groups.ep.size()
        if slices == 1:
            return counts.view(1, ranks, groups.local)
        of_all = counts.view(ranks, slices, groups.experts)
        return of_all[..., groups.first : groups.first + groups.local].transpose(0, 1)

    def _slice_rows(self, chunk: Chunk) -> list[int]:
        """Rows of the buffer of each rank with a slice of this rank's experts."""
        return [self.groups.ep.size() * chunk.values["bound"]] * self.groups.tp.size()

    def _group_sizes(self, rows: torch.Tensor, bound: int) -> torch.Tensor:
        """Sizes of the groups in buffers, int64 ``[n (experts of a rank + 1)]``.

        Args:
            rows: int64 ``[n, experts of a rank]``; those of nobody follow them for each rank.
            bound: the most rows for a rank.
        """
        nobodys = self.exchange.padding(rows.sum(1), bound)
        return torch.cat([rows, nobodys.unsqueeze(1)], 1).view(-1)
