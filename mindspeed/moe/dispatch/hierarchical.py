"""Two-level all-to-all: a token goes once to each node, and there once to each rank, that needs it.

    count          every rank learns how many rows go from where to where
    permute        a row for each (token, node)
    dispatch       all-to-all between nodes, among the ranks with the same number in their node
    relay          a row for each (row, rank of this node)
    dispatch_node  all-to-all within the node
    arrange        a row for each (row, local expert), sorted by expert
    disarrange     the sum over local experts, in fp32
    combine_node   all-to-all within the node
    merge          the sum over the ranks of this node, in fp32
    combine        all-to-all between nodes
    unpermute      the sum over nodes, in fp32

Links between nodes carry a token once for each node and not once for each of its k experts; within
nodes links are faster. The two levels are stages of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mindspeed.moe.dispatch.deduplicated import DeduplicatedDispatcher, again, again_rows
from mindspeed.moe.dispatch.level import Level
from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.nodes import NodeGroups
from mindspeed.moe.program import Program
from mindspeed.moe.request import LayerRequest
from mindspeed.moe.save.refetch import Steps
from mindspeed.moe.split_phase import Collective


def program(request: LayerRequest) -> Program:
    """The program of this dispatcher: shared experts hide the exchange between nodes."""
    experts = "relay dispatch_node! arrange experts disarrange combine_node! merge"
    count = "count> permute count<" if request.async_permutation or request.overlap else ""
    head = f"route {count or 'count! permute'}"
    if not request.overlap:
        return Program.parse(f"shared {head} dispatch! {experts} combine! unpermute")
    return Program.parse(
        f"{head} dispatch> shared_fc1 anchor dispatch< {experts} combine> shared_fc2 combine< "
        "unpermute"
    )


@dataclass(frozen=True)
class HierarchicalDispatcher(DeduplicatedDispatcher):
    """The stages; see the module's documentation.

    Attributes:
        nodes: groups between and within nodes.
    """

    nodes: NodeGroups
    _between: Level = field(init=False, repr=False)
    _within: Level = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        groups, nodes = self.groups, self.nodes
        between = Level("between", nodes.between, groups.experts, self.width, groups.wire)
        within = Level("within", nodes.within, between.per_member, between.width_after, groups.wire)
        object.__setattr__(self, "_between", between)
        object.__setattr__(self, "_within", within)

    def stages(self) -> Stages:
        """Functions of this dispatcher by name."""
        stages = super().stages()
        return replace(
            stages,
            compute={**stages.compute, "relay": self.relay, "merge": self.merge},
            communicate={
                **stages.communicate,
                "dispatch_node": self.dispatch_node,
                "combine_node": self.combine_node,
            },
        )

    def _destinations(self, ids: torch.Tensor) -> Sequence[torch.Tensor]:
        return (*super()._destinations(ids), self._between.destinations(ids).sum(0))

    def permute(self, chunk: Chunk) -> None:
        """``hidden [n, h]`` to ``rows [copies, h]``, sorted by node and by token."""
        self._between.spread(chunk, *chunk.values.pop("chosen"))

    def dispatch(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Rows to the nodes."""
        return self._between.dispatch(*self._between_splits(chunk))

    def relay(self, chunk: Chunk) -> None:
        """The rows that arrived, once for each rank of this node that owns experts of them."""
        copies = sum(self._within_splits(chunk)[0])
        self._within.spread(chunk, *self._between.arrived(chunk), copies)

    def dispatch_node(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Rows to the ranks of this node."""
        return self._within.dispatch(*self._within_splits(chunk))

    def arrived(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of the rows that this rank has received, ``[received, width]``."""
        return self._within.arrived(chunk)

    def combine_node(self, chunk: Chunk) -> Mapping[str, Collective]:
        """The sums back within the node."""
        return self._within.combine(*self._within_splits(chunk))

    def merge(self, chunk: Chunk) -> None:
        """The sums over the ranks of this node, ``[arrived, h]``."""
        self._within.merge(chunk)

    def combine(self, chunk: Chunk) -> Mapping[str, Collective]:
        """The sums back between nodes."""
        return self._between.combine(*self._between_splits(chunk))

    def unpermute(self, chunk: Chunk) -> None:
        """``rows [copies, h]`` to ``output [n, h]``."""
        self._between.merge(chunk)
        chunk.tensors["output"] = chunk.tensors.pop("rows")

    def repeat(self, chunk: Chunk) -> Steps:
        """Dispatch ``hidden [n, h]`` to experts' ``rows [m, h]`` again, without metadata."""
        return [
            *again(chunk, self._between, *self._between_splits(chunk)),
            *again(chunk, self._within, *self._within_splits(chunk)),
            again_rows(chunk, "experts"),
        ]

    def _between_splits(self, chunk: Chunk) -> tuple[list[int], list[int]]:
        """Rows that this rank sends to, and receives from, each node."""
        nodes, size, ranks = self._between.members, self._within.members, self.groups.ep.size()
        first = self.groups.experts + ranks
        to_nodes = self._counts(chunk)[:, first : first + nodes]  # [ranks, nodes]
        node, number = divmod(self.groups.ep.rank(), size)
        peers = to_nodes.view(nodes, size, nodes)[:, number]
        return peers[node].tolist(), peers[:, node].tolist()

    def _within_splits(self, chunk: Chunk) -> tuple[list[int], list[int]]:
        """Rows that this rank sends to, and receives from, each rank of its node."""
        nodes, size = self._between.members, self._within.members
        experts, ranks = self.groups.experts, self.groups.ep.size()
        to_ranks = self._counts(chunk)[:, experts : experts + ranks]
        node, number = divmod(self.groups.ep.rank(), size)
        # What the ranks with one number have for this node arrives at its rank with that number.
        through = to_ranks.view(nodes, size, nodes, size)[:, :, node].sum(0)  # [through, to]
        return through[number].tolist(), through[:, number].tolist()
