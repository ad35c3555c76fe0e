"""Padded dispatch: every rank sends each expert the same number of rows, so nothing is counted.

    permute    rows [E, C, h]: the tokens of each expert in their order, then zeros
    dispatch   all-to-all of equal parts
    arrange    [ranks, local experts, C, h] by local expert
    unpermute  the sum of the rows of each token; dropped ones are left out

C is the capacity, which all ranks compute alike from their number of tokens: no counts are
exchanged, and the host never waits for the device. Rows are selected by an index map, and their
gradients by the inverse map, where DeepSpeed's formula multiplies with one-hot matrices
``[n, E, C]``:

    out[i] = sum_j x[index[i, j]]          entries below 0 are left out

Nothing is scattered, so both passes are exact to one rounding and the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed import spmd
from mindspeed.moe.dispatch.all_to_all import AllToAllDispatcher
from mindspeed.moe.interpreter import Chunk
from mindspeed.moe.packing import Packing
from mindspeed.moe.program import Program
from mindspeed.moe.request import LayerRequest, program_of
from mindspeed.moe.save.refetch import Local


def program(request: LayerRequest) -> Program:
    """The program of the all-to-all dispatcher, without counts."""
    return program_of(request).without("count")


@dataclass(frozen=True)
class Slots:
    """Slots of tokens: the maps of padded rows, both ways.

    Attributes:
        capacity: C.
        of_token: int64 ``[n, k]``, slots ``e * C + i`` of each token, -1 for those dropped.
        of_pair: int64 ``[n * E, 1]``, the same for each (token, expert).
        tokens: int64 ``[E * C, 1]``, the token in each slot; -1: none.
        pairs: int64 ``[E * C, 1]``, ``token * E + expert`` in each slot; -1: none.
    """

    capacity: int
    of_token: torch.Tensor
    of_pair: torch.Tensor
    tokens: torch.Tensor
    pairs: torch.Tensor

    @classmethod
    def of(cls, routing_map: torch.Tensor, topk: int, first: int, capacity: int) -> Slots:
        """Slots in the order of tokens.

        Args:
            routing_map: bool ``[n, E]``, at most ``topk`` experts to a token.
            topk: k.
            first: an expert's rows before this one are left out.
            capacity: so are those from ``first + capacity`` on.
        """
        place = routing_map.cumsum(0) - 1 - first
        return cls.in_blocks(routing_map, place, topk, 1, capacity)

    @classmethod
    def in_blocks(
        cls, routing_map: torch.Tensor, place: torch.Tensor, topk: int, width: int, capacity: int
    ) -> Slots:
        """Slots of equal blocks, for ``width`` experts each.

        Args:
            routing_map: bool ``[n, E]``, at most ``topk`` experts to a token.
            place: int64 ``[n, E]``, in the block of the expert; left out where it is outside of it.
            topk: k.
            width: experts to a block, which lie one after the other.
            capacity: slots of a block.
        """
        count, experts = routing_map.shape
        inside = routing_map & (place >= 0) & (place < capacity)
        block = torch.arange(experts, device=routing_map.device) // width
        slot = (place + block * capacity).masked_fill(~inside, -1)  # [n, E]
        pair = torch.arange(count * experts, device=slot.device)
        # Pairs without a slot are scattered to a last one, which is cut off.
        nowhere = experts // width * capacity
        pairs = pair.new_full((nowhere + 1,), -1)
        pairs.scatter_(0, slot.reshape(-1).masked_fill(~inside.reshape(-1), nowhere), pair)
        pairs = pairs[:nowhere].unsqueeze(1)
        chosen = slot.topk(min(topk, experts), dim=1).values
        tokens = torch.div(pairs, experts, rounding_mode="floor")
        return cls(capacity, chosen, slot.view(-1, 1), tokens, pairs)

    def with_headers(self, blocks: int) -> Slots:
        """The maps for rows in equal blocks that begin with an empty row each."""
        rows = self.tokens.shape[0] // blocks

        def moved(slot: torch.Tensor) -> torch.Tensor:
            shift = torch.div(slot, max(rows, 1), rounding_mode="floor") + 1
            return torch.where(slot < 0, slot, slot + shift)

        def wider(source: torch.Tensor) -> torch.Tensor:
            empty = source.new_full((blocks, 1, 1), -1)
            return torch.cat([empty, source.view(blocks, rows, 1)], 1).view(-1, 1)

        of_token, of_pair = moved(self.of_token), moved(self.of_pair)
        return Slots(self.capacity, of_token, of_pair, wider(self.tokens), wider(self.pairs))


@dataclass(frozen=True)
class PaddedDispatcher(AllToAllDispatcher):
    """The all-to-all dispatcher with a number of rows that is known beforehand.

    Attributes:
        capacity: rows of an expert for a rank's number of tokens.
    """

    capacity: Callable[[int], int] = field(kw_only=True)

    def permute(self, chunk: Chunk) -> None:
        """``hidden [n, h]`` to ``rows [E * C, h]``; in ``values["slots"]``, if they are given."""
        if "slots" not in chunk.values:
            routing_map = chunk.tensors["routing_map"]
            capacity = self.capacity(routing_map.shape[0])
            chunk.values["slots"] = Slots.of(routing_map, self.width, 0, capacity)
        chunk.values["packing"] = self._packing(chunk)
        self.fill(chunk, chunk.values["slots"], "rows", "row_probs")

    def fill(self, chunk: Chunk, slots: Slots, rows: str, row_probs: str) -> None:
        """Put tokens and their probabilities into slots.

        Args:
            chunk: Has ``hidden [n, h]`` and ``probs [n, E]``.
            slots: Which token goes where.
            rows: Name of the result ``[E * C, h]``, with room for probabilities if packed.
            row_probs: Name of the probabilities ``[E * C]``, if they are not packed.
        """
        tensors, packing = chunk.tensors, chunk.values["packing"]
        hidden = tensors["hidden"] if packing is None else packing.widen(tensors["hidden"])
        filled = select_rows(hidden, slots.tokens, slots.of_token)
        probs = select_rows(tensors["probs"].reshape(-1, 1), slots.pairs, slots.of_pair)
        if packing is None:
            tensors[rows], tensors[row_probs] = filled, probs.squeeze(1)
        else:
            tensors[rows] = packing.pack(filled, probs.squeeze(1))

    def unpermute(self, chunk: Chunk) -> None:
        """``rows [E * C, h]`` to ``output [n, h]``."""
        slots = chunk.values["slots"]
        chunk.tensors["output"] = select_rows(chunk.tensors["rows"], slots.of_token, slots.tokens)

    def _permute_again(self, chunk: Chunk, rows: int) -> Local:
        slots = chunk.values["slots"]
        return lambda hidden: select_rows(hidden, slots.tokens, slots.of_token)

    @property
    def width(self) -> int:
        """The most experts of a token."""
        return self.groups.experts if self.topk is None else self.topk

    def _packing(self, chunk: Chunk) -> Packing | None:
        if not self.packed or self.groups.ep.size() == 1:
            return None
        return Packing.of(chunk.tensors["hidden"], chunk.tensors["probs"])

    def _counts(self, chunk: Chunk) -> torch.Tensor:
        """Rows of every rank for every expert, ``[ep, tp, E]`` on the host: all the same."""
        groups = self.groups
        shape = (groups.ep.size(), groups.tp.size(), groups.experts)
        return torch.full(shape, chunk.values["slots"].capacity)


def select_rows(x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return ``[m, h]``, sums in fp32 of selected rows.

    Args:
        x: ``[n, h]``, floating dtype.
        index: int64 ``[m, j]``, rows of ``x``; negative: none.
        inverse: int64 ``[n, i]``, the rows of the result in which each row of ``x`` is; negative:
            none.
    """
    return _SelectRows.apply(x, index, inverse)  # type: ignore[no-any-return]


@spmd.typed(spmd.Passes())
class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(index, inverse)
        return _sum(x, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        index, inverse = ctx.saved_tensors
        return select_rows(grads[0], inverse, index), None, None


def _sum(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if not x.shape[0]:
        return x.new_zeros(index.shape[0], x.shape[1])
    first, *others = index.unbind(1)
    out = _one(x, first)
    if others:
        out = out.to(torch.promote_types(x.dtype, torch.float32))
        for column in others:
            out += _one(x, column)
    return out.to(x.dtype)


def _one(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, index.clamp(min=0)).masked_fill_((index < 0).unsqueeze(1), 0)
