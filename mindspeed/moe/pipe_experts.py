"""Pieces of the experts' work: one local expert computes while others' rows travel.

    pieces = local expert i x slice j of the tokens, or of the experts' slots
    dispatch all; for each piece: dispatch< (gather) expert (scatter) combine>; all combine<

Only the first dispatch and the last combine have nothing beside them, 1 / (experts * slices) of
each. Slices are taken after the gate, so routing and losses are those of the whole. Each expert's
weight gradients are collected in one anchor: their hooks run once.

With expert tensor parallelism a piece's rows are gathered before the expert, and its results summed
after it. ``chained``: these collectives and the all-to-alls never share the link, and the pieces
are shifted against each other, so that one piece's collectives hide behind another's expert.

    slices by tokens      slice j has a part of the tokens, with all their rows; results are
                          concatenated
    slices by capacity    slice j has a part of every expert's slots, of all tokens; results are
                          added; for padded dispatch, where every slice is as long on all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil

import torch

from mindspeed.errors import ConfigError
from mindspeed.moe.collectives import BusyLink
from mindspeed.moe.dispatch.all_to_all import AllToAllDispatcher
from mindspeed.moe.dispatch.padded import PaddedDispatcher, Slots
from mindspeed.moe.events import EventLog
from mindspeed.moe.interpreter import Chunk, Communicate, Compute, Stages, execute
from mindspeed.moe.program import Program
from mindspeed.moe.split_phase import Collective

PIECES = Program.parse(
    "dispatch> shared_fc1 anchor (dispatch< gather! experts scatter! combine>) shared_fc2 combine<"
)
CHAINED = Program.parse(
    "[dispatch> shared_fc1 anchor dispatch< gather> gather< experts scatter> scatter< combine> "
    "shared_fc2 combine<]"
)


@dataclass(frozen=True)
class PipedExperts:
    """The stages of a layer whose experts are computed in pieces.

    Attributes:
        dispatcher: of the whole layer.
        slices: of the tokens, N.
        chained: collectives of the two expert groups wait for each other.
        absent: stages that the layer does not have.
    """

    dispatcher: AllToAllDispatcher
    slices: int = 1
    chained: bool = False
    absent: tuple[str, ...] = ()
    log: EventLog | None = None

    def stages(self, layer: Stages) -> Stages:
        """Functions for ``route count permute pieces unpermute``.

        Args:
            layer: ``route``, ``experts``, which computes the local expert ``values["expert"]``,
                and what is computed beside them.
        """

        def pieces(chunk: Chunk) -> None:
            self._compute(chunk, layer)

        own: dict[str, Compute] = {
            "permute": self.permute,
            "pieces": pieces,
            "unpermute": self.unpermute,
        }
        return Stages({**layer.compute, **own}, {**layer.communicate, "count": self.count})

    def count(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Gather every rank's rows for every expert and slice, ``[ranks, N experts]``."""
        maps = chunk.tensors["routing_map"].tensor_split(self.slices)
        return self.dispatcher.gather_counts(chunk, torch.cat([one.sum(0) for one in maps]))

    def permute(self, chunk: Chunk) -> None:
        """``hidden [n, h]`` to rows of each slice, sorted by local expert, rank and token.

        The rows for local expert i of all ranks lie together: they are one piece.
        """
        groups, tensors = self.dispatcher.groups, chunk.tensors
        order = torch.arange(groups.experts).view(-1, groups.local).t().reshape(-1)
        order = order.to(tensors["probs"].device)
        columns = {name: tensors[name].index_select(1, order) for name in ("probs", "routing_map")}
        whole = Chunk(tensors={"hidden": tensors["hidden"], **columns})
        slices = chunk.values["slices"] = sliced(self.dispatcher, whole, self.slices)
        for one in slices:
            one.values["host_counts"] = self._part(
                chunk, lambda counts, at: counts[:, at], one.index
            )
            self.dispatcher.permute(one)
        tensors["rows"] = slices[0].tensors["rows"]  # for the log

    def unpermute(self, chunk: Chunk) -> None:
        """The rows of each slice to ``output [n, h]``."""
        chunk.tensors["output"] = joined(self.dispatcher, chunk.values["slices"])

    def _compute(self, chunk: Chunk, layer: Stages) -> None:
        slices, local = chunk.values["slices"], self.dispatcher.groups.local
        pieces: list[Chunk] = []
        del chunk.tensors["rows"]
        for one in slices:
            pieces += self._cut(chunk, one, len(pieces))
        run = _Pieces(self.dispatcher, BusyLink() if self.chained else None)
        program = CHAINED if self.chained else PIECES
        execute(program.without(*self.absent), run.stages(layer), pieces, self.log)
        for j, one in enumerate(slices):
            rows = [piece.tensors["rows"] for piece in pieces[j * local : (j + 1) * local]]
            one.tensors["rows"] = torch.cat(rows)
        chunk.tensors["rows"] = slices[0].tensors["rows"]
        if "shared" in pieces[0].tensors:
            chunk.tensors["shared"] = pieces[0].tensors["shared"]

    def _cut(self, chunk: Chunk, one: Chunk, index: int) -> list[Chunk]:
        """One chunk for each local expert, with its rows of one slice."""
        groups, tensors = self.dispatcher.groups, one.tensors
        local = groups.local
        sizes = self._sizes(one)
        carried = {name: tensors[name].split(sizes) for name in self.dispatcher.carried(one)}
        kept = {name: x for name, x in one.values.items() if name in ("packing", "slots")}
        found = []
        for i in range(local):
            piece = Chunk(index + i, {name: parts[i] for name, parts in carried.items()})
            piece.values |= {
                **kept,
                "expert": i,
                "host_counts": self._part(
                    chunk,
                    lambda counts, at: counts[:, one.index].unflatten(1, (-1, local))[..., at],
                    i,
                ),
            }
            found.append(piece)
        return found

    def _sizes(self, one: Chunk) -> list[int]:
        """Rows of a slice for each local expert, of all ranks."""
        groups = self.dispatcher.groups
        if "slots" in one.values:  # padded
            return [groups.ep.size() * one.values["slots"].capacity] * groups.local
        own = groups.ep.rank() * groups.tp.size() + groups.tp.rank()
        counts = one.values["host_counts"].get()[own]  # [ep * local]
        return counts.view(-1, groups.local).sum(0).tolist()  # type: ignore[no-any-return]

    def _part(
        self, chunk: Chunk, select: Callable[[torch.Tensor, int], torch.Tensor], at: int
    ) -> _Part:
        def get() -> torch.Tensor:
            counts = chunk.values["host_counts"].get()
            return select(counts.view(-1, self.slices, self.dispatcher.groups.experts), at)

        return _Part(get)


@dataclass(frozen=True)
class _Part:
    """Some of the counts on the host."""

    get: Callable[[], torch.Tensor]


class _Pieces:
    """The stages of the pieces: for each, a layer with one local expert."""

    def __init__(self, dispatcher: AllToAllDispatcher, link: BusyLink | None) -> None:
        groups = dispatcher.groups
        one = replace(dispatcher, groups=replace(groups, experts=groups.ep.size())).stages()
        self._communicate = {
            name: self._chained(one.communicate[name], link, group)
            for name, group in [
                ("dispatch", "ep"), ("combine", "ep"), ("gather", "tp"), ("scatter", "tp"),
            ]
        }  # fmt: skip
        self._arrange = one.compute["arrange"]

    def stages(self, layer: Stages) -> Stages:
        """Stages of the pieces, with the experts of a layer and what is computed beside them."""

        def experts(chunk: Chunk) -> None:
            self._arrange(chunk)
            layer.compute["experts"](chunk)

        return Stages({"experts": experts}, self._communicate, layer.side)

    def _chained(self, communicate: Communicate, link: BusyLink | None, group: str) -> Communicate:
        if link is None:
            return communicate
        return lambda chunk: {
            name: link.chained(collective, group) for name, collective in communicate(chunk).items()
        }


_NAMES = ("hidden", "probs", "routing_map")


def sliced(dispatcher: AllToAllDispatcher, whole: Chunk, count: int) -> list[Chunk]:
    """The slices that suit a dispatcher; arguments as below."""
    if isinstance(dispatcher, PaddedDispatcher):
        return capacity_slices(dispatcher, whole, count)
    return token_slices(whole, count)


def token_slices(whole: Chunk, count: int) -> list[Chunk]:
    """``count`` chunks with a part of the tokens each; some may be empty.

    Args:
        whole: Has ``hidden [n, h]``, ``probs`` and ``routing_map`` ``[n, experts]``.
        count: N.
    """
    parts = [whole.tensors[name].tensor_split(count) for name in _NAMES]
    return [
        Chunk(j, dict(zip(_NAMES, part, strict=True)))
        for j, part in enumerate(zip(*parts, strict=True))
    ]


def capacity_slices(dispatcher: PaddedDispatcher, whole: Chunk, count: int) -> list[Chunk]:
    """``count`` chunks with a part of the slots each: as long as possible, the last one shorter.

    Args:
        dispatcher: Knows the capacity.
        whole: Has ``hidden [n, h]``, ``probs`` and ``routing_map`` ``[n, experts]``.
        count: N.

    Raises:
        ConfigError: there are more slices than slots.
    """
    routing_map = whole.tensors["routing_map"]
    capacity = dispatcher.capacity(routing_map.shape[0])
    if count > capacity:
        raise ConfigError(
            f"--pipe-experts-multi-data {count} is more than the {capacity} rows that each expert "
            f"has for {routing_map.shape[0]} tokens; choose at most {capacity}"
        )
    size = ceil(capacity / count)
    found = []
    for j, first in enumerate(range(0, capacity, size)):
        one = Chunk(j, {name: whole.tensors[name] for name in _NAMES})
        rows = min(size, capacity - first)
        one.values["slots"] = Slots.of(routing_map, dispatcher.width, first, rows)
        found.append(one)
    return found


def joined(dispatcher: AllToAllDispatcher, slices: list[Chunk]) -> torch.Tensor:
    """The output ``[n, h]`` of all slices, whose ``rows`` are the experts' results."""
    for one in slices:
        dispatcher.unpermute(one)
    outputs = [one.tensors["output"] for one in slices]
    if not isinstance(dispatcher, PaddedDispatcher):
        return torch.cat(outputs)
    total = outputs[0]
    for output in outputs[1:]:
        total = total + output
    return total
