"""Padded dispatch without drops: the capacity is predicted, and checked on the way.

    permute   rows [ranks, 1 + local experts * C, h]: each block begins with a header, this rank's
              largest number of rows for any expert
    dispatch  all-to-all of equal blocks: now every rank knows the largest number M of all ranks
    measure   reads the headers
    rest      if M > C, a second all-to-all of the M - C slots that were missing, on all ranks alike
    combine   one all-to-all of max(C, M) slots

Shapes are static while predictions hold (:class:`mindspeed.moe.deepspeed.gate.Window`), no
token is dropped, and no collective is added for agreeing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from mindspeed.moe.collectives import AllToAll
from mindspeed.moe.deepspeed.gate import Window
from mindspeed.moe.dispatch import padded
from mindspeed.moe.dispatch.padded import PaddedDispatcher, Slots
from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.program import Phase, Program, Step
from mindspeed.moe.request import LayerRequest
from mindspeed.moe.split_phase import Collective

_CHECK = Program.parse("measure rest!").steps


def program(request: LayerRequest) -> Program:
    """The program of padded dispatch, with the check after the dispatch."""
    steps = padded.program(request).steps
    there = steps.index(Step("dispatch", Phase.FINISH)) + 1
    return Program(steps[:there] + _CHECK + steps[there:])


@dataclass(frozen=True)
class WindowDispatcher(PaddedDispatcher):
    """The stages; see the module's documentation.

    Attributes:
        capacity: the prediction; gets the loads that were observed.
        observes: whether it gets them: not in an evaluation.
    """

    capacity: Window = field(kw_only=True)
    observes: bool = field(kw_only=True)

    def stages(self) -> Stages:
        """Functions of this dispatcher by name."""
        stages = super().stages()
        return replace(
            stages,
            compute={**stages.compute, "measure": self.measure},
            communicate={**stages.communicate, "rest": self.rest},
        )

    def permute(self, chunk: Chunk) -> None:
        """``hidden [n, h]`` to ``rows [ranks * (1 + local * C), h]`` with headers."""
        routing_map, ranks = chunk.tensors["routing_map"], self.groups.ep.size()
        slots = Slots.of(routing_map, self.width, 0, self.capacity(routing_map.shape[0]))
        load = routing_map.sum(0).max()
        chunk.values |= {"slots": slots, "load": load, "packing": self._packing(chunk)}
        if ranks == 1:
            self.fill(chunk, slots, "rows", "row_probs")
            return
        self.fill(chunk, slots.with_headers(ranks), "rows", "row_probs")
        with torch.no_grad():
            self._headers(chunk.tensors["rows"])[:] = load.view(1).view(torch.uint8)

    def dispatch(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Blocks with headers to the ranks of their experts."""
        return self._equal(chunk, "rows", 1 + self.groups.local * chunk.values["slots"].capacity)

    def measure(self, chunk: Chunk) -> None:
        """Read the headers; rows beyond the capacity become the tensor ``rest``."""
        load = chunk.values["load"]
        if self.groups.ep.size() > 1:
            load = self._headers(chunk.tensors["rows"]).contiguous().view(torch.int64).max()
        largest, capacity = int(load), chunk.values["slots"].capacity
        if self.observes:
            self.capacity.observe(largest)
        chunk.values["extra"] = extra = max(largest - capacity, 0)
        if not extra:
            return
        routing_map = chunk.tensors["routing_map"]
        self.fill(chunk, Slots.of(routing_map, self.width, capacity, extra), "rest", "rest_probs")
        chunk.values["slots"] = Slots.of(routing_map, self.width, 0, capacity + extra)

    def rest(self, chunk: Chunk) -> Mapping[str, Collective]:
        """The rows beyond the capacity, if any rank has any."""
        extra: int = chunk.values["extra"]
        return self._equal(chunk, "rest", self.groups.local * extra) if extra else {}

    def arrange(self, chunk: Chunk) -> None:
        """Rows by local expert, ``[local * ranks * slots, h]``."""
        tensors, packing = chunk.tensors, chunk.values["packing"]
        if packing is None:
            for name, rest in (("rows", "rest"), ("row_probs", "rest_probs")):
                tensors[name] = self._by_expert(chunk, tensors[name], tensors.get(rest))
        else:
            rows = tensors["rows"].view(self.groups.ep.size(), -1, packing.columns)[:, 1:]
            rows = self._by_expert(chunk, rows, tensors.get("rest"))
            tensors["rows"], tensors["row_probs"] = packing.unpack(rows)
        slots = self.groups.ep.size() * chunk.values["slots"].capacity
        chunk.values["tokens_per_expert"] = torch.full((self.groups.local,), slots)

    def _by_expert(
        self, chunk: Chunk, rows: torch.Tensor, rest: torch.Tensor | None
    ) -> torch.Tensor:
        """``[ranks * local * C, ...]`` and the slots that were missing, by local expert."""
        ranks, local, shape = self.groups.ep.size(), self.groups.local, rows.shape[-1:]
        shape = shape if rows.dim() > 1 else torch.Size()
        total, extra = chunk.values["slots"].capacity, chunk.values["extra"]
        whole = rows.reshape(ranks, local, total - extra, *shape)
        if rest is not None:
            whole = torch.cat([whole, rest.view(ranks, local, extra, *shape)], 2)
        return whole.transpose(0, 1).reshape(-1, *shape)

    def _headers(self, rows: torch.Tensor) -> torch.Tensor:
        """The eight bytes of the headers, uint8 ``[ranks, 8]``, a view of ``rows [m, w]``.

        The last of an empty row, which has room for a probability there that is not quantised.
        """
        blocks = rows.detach().view(self.groups.ep.size(), -1, rows.shape[-1])
        return blocks[:, 0].view(torch.uint8)[:, -8:]

    def _equal(self, chunk: Chunk, name: str, rows: int) -> Mapping[str, Collective]:
        """Send ``rows`` rows to every rank, if there are others."""
        ranks = self.groups.ep.size()
        equal = AllToAll(self.groups.ep, [rows] * ranks, [rows] * ranks)
        return {} if ranks == 1 else {name: self.groups.wire.tokens(equal)}
