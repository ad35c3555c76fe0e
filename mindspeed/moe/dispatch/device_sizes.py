"""All-to-all without a size on the host: equal blocks of a bound, whose fill stays on the device.

    count      how many rows of a block are for each expert, to the rank of the experts
    permute    [R, C, h]: a block for each rank, its rows sorted by expert and by token, then zeros
    dispatch   all-to-all of equal blocks
    arrange    rows by local expert, those of nobody last
    disarrange the inverse
    combine    all-to-all of equal blocks
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

from mindspeed.moe.collectives import AllToAll
from mindspeed.moe.device_bound import DeviceBound
from mindspeed.moe.dispatch.padded import PaddedDispatcher, Slots, select_rows
from mindspeed.moe.interpreter import Chunk
from mindspeed.moe.save.refetch import Steps
from mindspeed.moe.split_phase import Collective
from mindspeed.te.device_groups import DeviceSizes


@dataclass(frozen=True)
class DeviceDispatcher(PaddedDispatcher):
    """The stages; see the module's documentation.

    Attributes:
        bound: of the rows.
    """

    bound: DeviceBound = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.groups.tp.size() > 1:
            raise NotImplementedError("sizes stay on the device for whole experts only")

    def count(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Rows of this rank's blocks for each expert, int64 ``[E]``, to the experts' ranks."""
        groups, routing_map = self.groups, chunk.tensors["routing_map"]
        ranks, local, tokens = groups.ep.size(), groups.local, routing_map.shape[0]
        capacity = self.bound.rows(tokens, self.width, ranks, local)
        counts = routing_map.sum(0).view(ranks, local)
        before = counts.cumsum(1) - counts  # in the block
        place = routing_map.cumsum(0) - 1 + before.view(-1)
        chunk.values["slots"] = Slots.in_blocks(routing_map, place, self.width, local, capacity)
        self.bound.note(chunk.values.get("layer", 0), (counts.sum(1) > capacity).any())
        kept = torch.minimum(counts, (capacity - before).clamp(min=0))
        chunk.tensors["counts"] = kept.view(-1)
        equal = AllToAll(groups.ep, [local] * ranks, [local] * ranks)
        return {"counts": equal} if ranks > 1 else {}

    def arrange(self, chunk: Chunk) -> None:
        """``[R, C, h]`` to ``rows [R C, h]`` by local expert; sizes are on the device."""
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

    def repeat(self, chunk: Chunk) -> Steps:
        """Dispatch ``hidden [n, h]`` to experts' ``rows [m, h]`` again, without probabilities."""
        order, inverse = chunk.values["order"]
        arrange = lambda rows: select_rows(rows, order, inverse)  # noqa: E731
        blocks = self.groups.wire.tokens(AllToAll(self.groups.ep, *self._splits(chunk)))
        sent = [blocks] if self.groups.ep.size() > 1 else []
        return [self._permute_again(chunk, 0), *sent, arrange]

    def _order(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """The slot of each row by expert, and the row of each slot, int64 ``[R C, 1]`` each."""
        ranks, capacity = self.groups.ep.size(), chunk.values["slots"].capacity
        counts = chunk.tensors.pop("counts").view(ranks, -1)
        slot = torch.arange(capacity, device=counts.device).expand(ranks, -1).contiguous()
        # The expert of a slot; behind the last for those of nobody.
        expert = torch.searchsorted(counts.cumsum(1), slot, right=True).view(-1)
        order = torch.argsort(expert, stable=True)
        row = torch.arange(order.shape[0], device=order.device)
        inverse = torch.empty_like(order).scatter_(0, order, row)
        chunk.values["order"] = found = order.unsqueeze(1), inverse.unsqueeze(1)
        sizes = DeviceSizes.of(counts.sum(0), ranks * capacity)
        chunk.values["tokens_per_expert"] = sizes
        return found

    def _splits(self, chunk: Chunk) -> tuple[list[int], list[int]]:
        """Equal blocks."""
        equal = [chunk.values["slots"].capacity] * self.groups.ep.size()
        return equal, equal
