"""All-to-all: every rank sends the copies of its tokens to the ranks of their experts.

    count      every rank learns how many rows each rank has for each expert
    permute    a row for each (token, expert), sorted by expert
    dispatch   all-to-all of rows and their probabilities over the expert group
    arrange    rows by local expert; with expert tensor parallelism gathered before
    disarrange the inverse; reduce-scattered
    combine    all-to-all of the experts' results
    unpermute  the sum of the rows of each token

Nothing is kept on the dispatcher, so micro-batches and chunks do not mix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed.moe.collectives import AllToAll, Gather
from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.split_phase import Collective
from mindspeed.te import kernels


@dataclass(frozen=True)
class ExpertGroups:
    """Who shares the experts of a layer.

    Attributes:
        experts: all experts of the layer.
        ep: expert parallel group: its ranks hold different experts.
        tp: expert tensor parallel group: its ranks hold slices of the same experts.
        tp_ep: both, ``tp`` varying fastest.
    """

    experts: int
    ep: dist.ProcessGroup
    tp: dist.ProcessGroup
    tp_ep: dist.ProcessGroup

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
        groups: who shares the experts.
    """

    groups: ExpertGroups

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
                "combine": self.combine,
            },
        )

    def count(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Gather the rows of every rank for every expert: ``counts [ranks, experts]``, int64."""
        chunk.tensors["counts"] = chunk.tensors["routing_map"].sum(0)
        return {} if self.groups.tp_ep.size() == 1 else {"counts": Gather(self.groups.tp_ep)}

    def permute(self, chunk: Chunk) -> None:
        """``hidden [n, h]`` to ``rows [copies, h]``, sorted by expert and by token."""
        tensors = chunk.tensors
        rows, probs, chunk.values["row_id_map"] = kernels.moe_permute(
            tensors["hidden"], tensors["probs"], tensors["routing_map"], None
        )
        assert probs is not None
        tensors["rows"], tensors["row_probs"] = rows, probs

    def dispatch(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Rows and probabilities to the ranks of their experts."""
        groups, local = self.groups, self.groups.local
        counts = chunk.tensors["counts"].view(groups.ep.size(), groups.tp.size(), -1)
        mine = counts[:, :, groups.first : groups.first + local]  # [ep, tp, local]
        own = counts[groups.ep.rank(), groups.tp.rank()]
        # The one copy to the host of a layer: splits, and rows by rank and local expert.
        host = torch.cat([own.view(-1, local).sum(1), mine.reshape(-1)]).tolist()
        sent, sizes = host[: groups.ep.size()], host[groups.ep.size() :]
        by_rank = torch.tensor(sizes, dtype=torch.int64).view(groups.ep.size(), -1, local)
        received = by_rank[:, groups.tp.rank()].sum(1).tolist()
        chunk.values |= {"sent": sent, "received": received, "sizes": by_rank}
        if groups.ep.size() == 1:
            return {}
        to_experts = AllToAll(groups.ep, sent, received)
        return {"rows": to_experts, "row_probs": to_experts}

    def arrange(self, chunk: Chunk) -> None:
        """Rows by local expert; the experts' counts are ``values["tokens_per_expert"]``."""
        sizes = chunk.values["sizes"]  # [ep, tp, local]
        if self.groups.tp.size() > 1:
            raise NotImplementedError("expert tensor parallelism")
        chunk.values["tokens_per_expert"] = sizes.sum((0, 1))
        if self.groups.local == 1:
            return
        pieces = sizes.reshape(-1, self.groups.local)
        order = torch.arange(pieces.numel()).view(pieces.shape).t().reshape(-1)
        tensors = chunk.tensors
        tensors["rows"], tensors["row_probs"] = kernels.moe_sort_chunks(
            (tensors["rows"], tensors["row_probs"]), pieces.reshape(-1), order
        )

    def disarrange(self, chunk: Chunk) -> None:
        """The order in which the rows came."""
        if self.groups.local == 1:
            return
        pieces = chunk.values["sizes"].reshape(-1, self.groups.local).t()
        order = torch.arange(pieces.numel()).view(pieces.shape).t().reshape(-1)
        (chunk.tensors["rows"],) = kernels.moe_sort_chunks(
            (chunk.tensors["rows"],), pieces.reshape(-1), order
        )

    def combine(self, chunk: Chunk) -> Mapping[str, Collective]:
        """The results back to the ranks of their tokens."""
        if self.groups.ep.size() == 1:
            return {}
        values = chunk.values
        return {"rows": AllToAll(self.groups.ep, values["received"], values["sent"])}

    def unpermute(self, chunk: Chunk) -> None:
        """``rows [copies, h]`` to ``output [n, h]``."""
        tensors = chunk.tensors
        tensors["output"] = kernels.moe_unpermute(
            tensors["rows"], chunk.values["row_id_map"], None, tensors["hidden"].shape
        )
