"""All-to-all without duplicates: a token goes once to each rank that owns experts of it.

    count      every rank learns how many rows go from where to where
    permute    a row for each (token, rank), with the ids and weights of that rank's experts
    dispatch   all-to-all of rows and metadata over the expert group
    arrange    a row for each (row, local expert), sorted by expert
    disarrange the sum over local experts, in fp32
    combine    all-to-all of the sums
    unpermute  the sum over ranks, in fp32

The flat exchange sends a token once for each of its k experts. Probabilities are applied within the
experts, so results are plain sums, and the sums of one rank can be sent as one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mindspeed.moe.collectives import Gather
from mindspeed.moe.dispatch.all_to_all import ExpertGroups
from mindspeed.moe.dispatch.compact import TOO_MANY, chosen, compact, expand
from mindspeed.moe.dispatch.level import Level, RowSpread, sum_rows
from mindspeed.moe.host_copy import HostCopy, ToHost
from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.program import Program
from mindspeed.moe.request import LayerRequest
from mindspeed.moe.save.refetch import Local, Steps
from mindspeed.moe.split_phase import Collective
from mindspeed.te import kernels


def program(request: LayerRequest) -> Program:
    count = "count> permute count<" if request.async_permutation or request.overlap else ""
    head = f"route {count or 'count! permute'}"
    if not request.overlap:
        return Program.parse(
            f"shared {head} dispatch! arrange experts disarrange combine! unpermute"
        )
    return Program.parse(
        f"{head} dispatch> shared_fc1 anchor dispatch< arrange experts disarrange combine> "
        "shared_fc2 combine< unpermute"
    )


@dataclass(frozen=True)
class DeduplicatedDispatcher:
    """The stages; see the module's documentation.

    Attributes:
        groups: who shares the experts, which are whole on every rank.
        width: the most experts that a token can have.
    """

    groups: ExpertGroups
    width: int
    _ranks: Level = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.groups.tp.size() > 1:
            raise NotImplementedError("tokens are sent once to ranks that hold whole experts only")
        groups = self.groups
        ranks = Level("ranks", groups.ep, groups.experts, self.width, groups.wire)
        object.__setattr__(self, "_ranks", ranks)

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
            repeat=self.repeat,
        )

    def count(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Gather what every rank has for every expert and every destination, to the host."""
        tensors, copy = chunk.tensors, HostCopy()
        ids, weights = compact(tensors["probs"], tensors["routing_map"], self.width)
        chunk.values["chosen"], tensors["rows"] = (ids, weights), tensors["hidden"]
        counts = [chosen(ids, self.groups.experts).sum(0), *self._destinations(ids)]
        counts.append((ids == TOO_MANY).any().long().view(1))
        chunk.values["host_counts"] = copy
        tensors["counts"] = torch.cat(counts)
        if self.groups.ep.size() == 1:
            copy.start(tensors["counts"])
            return {}
        return {"counts": ToHost(Gather(self.groups.ep), copy)}

    def _destinations(self, ids: torch.Tensor) -> Sequence[torch.Tensor]:
        """Rows for every destination, int64, after those for every expert."""
        return (self._ranks.destinations(ids).sum(0),)

    def permute(self, chunk: Chunk) -> None:
        """``hidden [n, h]`` to ``rows [copies, h]``, sorted by rank and by token."""
        self._ranks.spread(chunk, *chunk.values.pop("chosen"))

    def dispatch(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Rows to the ranks."""
        return self._ranks.dispatch(*self._splits(chunk))

    def arrived(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of the rows that this rank has received, ``[received, width]``."""
        return self._ranks.arrived(chunk)

    def arrange(self, chunk: Chunk) -> None:
        """A row for each (row, local expert), sorted by expert and by row."""
        tensors, values, groups = chunk.tensors, chunk.values, self.groups
        probs, to = expand(*self.arrived(chunk), groups.local)
        mine = self._counts(chunk)[:, groups.first : groups.first + groups.local].sum(0)
        shape, copies = tensors["rows"].shape, int(mine.sum())
        rows, row_probs, row_id_map = kernels.moe_permute(tensors["rows"], probs, to, copies)
        assert row_probs is not None
        tensors["rows"], tensors["row_probs"] = rows, row_probs
        values["tokens_per_expert"] = mine
        values["experts"] = RowSpread(row_id_map, to, copies, shape)

    def disarrange(self, chunk: Chunk) -> None:
        """The sums over local experts, in the order in which the rows came."""
        done: RowSpread = chunk.values["experts"]
        chunk.tensors["rows"] = sum_rows(
            chunk.tensors["rows"], done.row_id_map, done.to, done.shape
        )

    def combine(self, chunk: Chunk) -> Mapping[str, Collective]:
        """The sums back to the ranks of their tokens."""
        return self._ranks.combine(*self._splits(chunk))

    def unpermute(self, chunk: Chunk) -> None:
        """``rows [copies, h]`` to ``output [n, h]``."""
        self._ranks.merge(chunk)
        chunk.tensors["output"] = chunk.tensors.pop("rows")

    def repeat(self, chunk: Chunk) -> Steps:
        """Dispatch ``hidden [n, h]`` to experts' ``rows [m, h]`` again, without metadata."""
        return [*again(chunk, self._ranks, *self._splits(chunk)), again_rows(chunk, "experts")]

    def _counts(self, chunk: Chunk) -> torch.Tensor:
        """``[ranks, experts + destinations]`` on the host.

        Raises:
            RuntimeError: on all ranks: a router chose more experts than there are places for.
        """
        counts: torch.Tensor = chunk.values["host_counts"].get().view(self.groups.ep.size(), -1)
        if counts[:, -1].any():
            raise RuntimeError(
                f"a token has more than {self.width} experts, the most that its router may choose"
            )
        return counts[:, :-1]

    def _splits(self, chunk: Chunk) -> tuple[list[int], list[int]]:
        """Rows that this rank sends to, and receives from, each rank."""
        rank, experts = self.groups.ep.rank(), self.groups.experts
        to_ranks = self._counts(chunk)[:, experts : experts + self.groups.ep.size()]
        return to_ranks[rank].tolist(), to_ranks[:, rank].tolist()


def again(chunk: Chunk, level: Level, sent: Sequence[int], received: Sequence[int]) -> Steps:
    """The steps that repeat a level: its permutation and its exchange of rows."""
    return [again_rows(chunk, level.name), *level.again(sent, received)]


def again_rows(chunk: Chunk, name: str) -> Local:
    """A function that repeats one permutation on ``[n, h]``."""
    done: RowSpread = chunk.values[name]
    return lambda rows: kernels.moe_permute_again(rows, done.row_id_map, done.copies)
