"""All-to-all: every rank sends the copies of its tokens to the ranks of their experts.

    count      every rank learns how many rows each rank has for each expert
    permute    a row for each (token, expert), sorted by expert
    dispatch   all-to-all of rows and their probabilities over the expert group
    gather     expert tensor parallelism: rows of all ranks that hold slices of the experts
    arrange    rows by local expert
    disarrange the inverse
    scatter    the inverse of gather: the sum over the slices
    combine    all-to-all of the experts' results
    unpermute  the sum of the rows of each token

Nothing is kept on the dispatcher, so micro-batches and chunks do not mix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed.moe.collectives import AllToAll, Gather, GatherRows, SumRows, sum_in_fp32
from mindspeed.moe.host_copy import HostCopy, ToHost
from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.packing import Packing
from mindspeed.moe.save.refetch import Local, Steps
from mindspeed.moe.split_phase import Collective
from mindspeed.moe.wire import PLAIN, Wire
from mindspeed.te import kernels


@dataclass(frozen=True)
class ExpertGroups:
    """Who shares the experts of a layer.

    Attributes:
        experts: all experts of the layer.
        ep: expert parallel group: its ranks hold different experts.
        tp: expert tensor parallel group: its ranks hold slices of the same experts.
        tp_ep: both, ``tp`` varying fastest.
        wire: how rows travel between them.
    """

    experts: int
    ep: dist.ProcessGroup
    tp: dist.ProcessGroup
    tp_ep: dist.ProcessGroup
    wire: Wire = PLAIN

    @property
    def local(self) -> int:
        """Experts of this rank."""
        return self.experts // self.ep.size()

    @property
    def first(self) -> int:
        """Index of this rank's first expert."""
        return self.ep.rank() * self.local


@dataclass(frozen=True)
class AllToAllDispatcher:
    """The stages; see the module's documentation.

    Attributes:
        topk: experts of every token, so that the number of its copies is known before counts are
            on the host; None if tokens are dropped, then ``count`` must end before ``permute``.
        packed: probabilities travel in the rows.
    """

    groups: ExpertGroups
    topk: int | None = None
    packed: bool = True

    def stages(self) -> Stages:
        """Functions of this dispatcher by name."""
        return Stages(
            compute={
                "permute": self.permute,
                "arrange": self.arrange,
                "disarrange": self.disarrange,
                "unpermute": self.unpermute,
            },
            communicate={
                "count": self.count,
                "dispatch": self.dispatch,
                "gather": self.gather,
                "scatter": self.scatter,
                "combine": self.combine,
            },
            repeat=self.repeat,
        )

    def count(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Gather the rows of every rank for every expert, ``[ranks, experts]``, to the host."""
        return self.gather_counts(chunk, chunk.tensors["routing_map"].sum(0))

    def gather_counts(self, chunk: Chunk, counts: torch.Tensor) -> Mapping[str, Collective]:
        """Gather integers ``counts [m]`` of every rank to the host, ``[ranks, m]``."""
        copy = chunk.values["host_counts"] = HostCopy()
        if self.groups.tp_ep.size() == 1:
            copy.start(counts)
            return {}
        chunk.tensors["counts"] = counts
        return {"counts": ToHost(Gather(self.groups.tp_ep), copy)}

    def permute(self, chunk: Chunk) -> None:
        """``hidden [n, h]`` to ``rows [copies, h]``, sorted by expert and by token."""
        tensors, hidden = chunk.tensors, chunk.tensors["hidden"]
        copies = self._copies(chunk)
        packing = None
        if self.packed and self.groups.ep.size() > 1:
            packing = Packing.of(hidden, tensors["probs"])
            hidden = packing.widen(hidden)
        rows, probs, chunk.values["row_id_map"] = kernels.moe_permute(
            hidden, tensors["probs"], tensors["routing_map"], copies
        )
        assert probs is not None
        chunk.values["packing"] = packing
        if packing is None:
            tensors["rows"], tensors["row_probs"] = rows, probs
        else:
            tensors["rows"] = packing.pack(rows, probs)

    def dispatch(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Rows and probabilities to the ranks of their experts."""
        if self.groups.ep.size() == 1:
            return {}
        sent, received = self._splits(chunk)
        to_experts = AllToAll(self.groups.ep, sent, received)
        return self._carry(chunk, to_experts)

    def gather(self, chunk: Chunk) -> Mapping[str, Collective]:
        """The rows that the expert's other slices have received."""
        if self.groups.tp.size() == 1:
            return {}
        packing = chunk.values["packing"]
        add = sum_in_fp32 if packing is None else packing.add
        rows = GatherRows(self.groups.tp, self._slice_rows(chunk), add)
        return self._carry(chunk, rows)

    def arrange(self, chunk: Chunk) -> None:
        """Rows by local expert; the experts' counts are ``values["tokens_per_expert"]``."""
        tensors, sizes = chunk.tensors, self._sizes(chunk)
        chunk.values["tokens_per_expert"] = sizes.sum((0, 1))
        if (packing := chunk.values["packing"]) is not None:
            tensors["rows"], tensors["row_probs"] = packing.unpack(tensors["rows"])
        if self.groups.local == 1:
            return
        pieces = sizes.reshape(-1, self.groups.local)
        order = torch.arange(pieces.numel()).view(pieces.shape).t().reshape(-1)
        tensors["rows"], tensors["row_probs"] = kernels.moe_sort_chunks(
            (tensors["rows"], tensors["row_probs"]), pieces.reshape(-1), order
        )

    def disarrange(self, chunk: Chunk) -> None:
        """The order in which the rows came."""
        if self.groups.local == 1:
            return
        pieces = self._sizes(chunk).reshape(-1, self.groups.local).t()
        order = torch.arange(pieces.numel()).view(pieces.shape).t().reshape(-1)
        (chunk.tensors["rows"],) = kernels.moe_sort_chunks(
            (chunk.tensors["rows"],), pieces.reshape(-1), order
        )

    def scatter(self, chunk: Chunk) -> Mapping[str, Collective]:
        """The sum of the results of the expert's slices, of the rows that this rank received."""
        if self.groups.tp.size() == 1:
            return {}
        slices = SumRows(self.groups.tp, self._slice_rows(chunk))
        return {"rows": self.groups.wire.results(slices)}

    def combine(self, chunk: Chunk) -> Mapping[str, Collective]:
        """The results back to the ranks of their tokens."""
        if self.groups.ep.size() == 1:
            return {}
        sent, received = self._splits(chunk)
        return {"rows": self.groups.wire.results(AllToAll(self.groups.ep, received, sent))}

    def unpermute(self, chunk: Chunk) -> None:
        """``rows [copies, h]`` to ``output [n, h]``."""
        tensors = chunk.tensors
        tensors["output"] = kernels.moe_unpermute(
            tensors["rows"], chunk.values["row_id_map"], None, tensors["hidden"].shape
        )

    def repeat(self, chunk: Chunk) -> Steps:
        """Dispatch ``hidden [n, h]`` to experts' ``rows [m, h]`` again, without probabilities."""
        groups, (sent, received) = self.groups, self._splits(chunk)
        steps: list[Local | Collective] = [self._permute_again(chunk, sum(sent))]
        if groups.ep.size() > 1:
            steps.append(groups.wire.tokens(AllToAll(groups.ep, sent, received)))
        sizes = self._sizes(chunk)
        if groups.tp.size() > 1:
            slices = GatherRows(groups.tp, self._slice_rows(chunk))
            steps.append(groups.wire.tokens(slices))
        if groups.local > 1:
            pieces = sizes.reshape(-1, groups.local)
            order = torch.arange(pieces.numel()).view(pieces.shape).t().reshape(-1)
            steps.append(
                lambda rows: kernels.moe_sort_chunks((rows,), pieces.reshape(-1), order)[0]
            )
        return steps

    def _permute_again(self, chunk: Chunk, rows: int) -> Local:
        ids = chunk.values["row_id_map"]
        return lambda hidden: kernels.moe_permute_again(hidden, ids, rows)

    def carried(self, chunk: Chunk) -> tuple[str, ...]:
        """Names of the tensors that travel to the experts."""
        return ("rows", "row_probs") if chunk.values["packing"] is None else ("rows",)

    def _carry(self, chunk: Chunk, collective: Collective) -> Mapping[str, Collective]:
        """What moves the rows, and what they carry, to the experts."""
        rows = self.groups.wire.tokens(collective)
        return {name: rows if name == "rows" else collective for name in self.carried(chunk)}

    def _counts(self, chunk: Chunk) -> torch.Tensor:
        """Rows of every rank for every expert, ``[ep, tp, experts]`` on the host."""
        counts: torch.Tensor = chunk.values["host_counts"].get()
        return counts.view(self.groups.ep.size(), self.groups.tp.size(), -1)

    def _copies(self, chunk: Chunk) -> int | None:
        """Rows of this rank: a token's copies."""
        if self.topk is not None:
            return int(chunk.tensors["routing_map"].shape[0]) * self.topk
        groups = self.groups
        return int(self._counts(chunk)[groups.ep.rank(), groups.tp.rank()].sum())

    def _sizes(self, chunk: Chunk) -> torch.Tensor:
        """Rows of this rank's experts by the ranks where they were gathered: ``[tp, ep, local]``.

        A slice of an expert receives from the ranks of its own index ``tp``; it has the rows of the
        others after ``gather``.
        """
        first = self.groups.first
        return self._counts(chunk)[..., first : first + self.groups.local].transpose(0, 1)

    def _slice_rows(self, chunk: Chunk) -> list[int]:
        """Rows that each rank with a slice of this rank's experts receives."""
        return self._sizes(chunk).sum((1, 2)).tolist()  # type: ignore[no-any-return]

    def _splits(self, chunk: Chunk) -> tuple[list[int], list[int]]:
        """Rows that this rank sends to, and receives from, each rank of ``ep``."""
        groups = self.groups
        own = self._counts(chunk)[groups.ep.rank(), groups.tp.rank()]
        sent = own.view(groups.ep.size(), -1).sum(1).tolist()
        return sent, self._sizes(chunk)[groups.tp.rank()].sum(1).tolist()
