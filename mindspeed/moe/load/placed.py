"""A layer whose experts are in other slots than their numbers, as a change of its stages.

    stages = placed(stages, slots)           # slot of each expert

Router, bias, ties of its choice and balancing losses know numbers. ``permute`` sorts rows by number
as ever and then by slot, ``unpermute`` takes them back before it sums the copies of a token: sums
run in the same order for every placement, forward and backward, so losses are equal to the bit.
Each way costs one more move of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.load.slots import inverse
from mindspeed.moe.split_phase import Collective


def placed(stages: Stages, slots: Sequence[int]) -> Stages:
    """The stages of a layer with a placement.

    Args:
        stages: of the all-to-all dispatcher.
        slots: slot of each expert.
    """
    permute, unpermute = stages.compute["permute"], stages.compute["unpermute"]
    count, repeat = stages.communicate["count"], stages.repeat
    experts = inverse(slots)

    def counted(chunk: Chunk) -> Mapping[str, Collective]:
        by_number = chunk.tensors["routing_map"]
        chunk.tensors["routing_map"] = by_number[:, experts]
        try:
            return count(chunk)
        finally:
            chunk.tensors["routing_map"] = by_number

    def sorted_by_slot(chunk: Chunk) -> None:
        permute(chunk)
        tensors = chunk.tensors
        source, place = moves(tensors["routing_map"], slots, tensors["rows"].shape[0])
        chunk.values["of_slots"], chunk.values["of_numbers"] = source, place
        for name in ("rows", "row_probs"):
            if name in tensors:
                tensors[name] = tensors[name].index_select(0, source)

    def sorted_by_number(chunk: Chunk) -> None:
        tensors = chunk.tensors
        tensors["rows"] = tensors["rows"].index_select(0, chunk.values["of_numbers"])
        unpermute(chunk)

    def repeated(chunk: Chunk) -> Sequence[Any]:
        assert repeat is not None
        first, *others = repeat(chunk)
        source = chunk.values["of_slots"]
        return [first, lambda rows: rows.index_select(0, source), *others]

    return replace(
        stages,
        compute={**stages.compute, "permute": sorted_by_slot, "unpermute": sorted_by_number},
        communicate={**stages.communicate, "count": counted},
        repeat=None if repeat is None else repeated,
    )


def moves(
    routing_map: torch.Tensor, slots: Sequence[int], rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices that sort rows by slot, and back by number.

    Args:
        routing_map: bool ``[n, experts]``, by number.
        slots: slot of each expert.
        rows: their number.

    Returns:
        int64 ``[rows]``, for each row by slot the row by number, and the inverse.
    """
    here = routing_map.device
    counts = routing_map.sum(0)
    slot = torch.tensor(list(slots), device=here)
    by_slot = torch.empty_like(counts).scatter_(0, slot, counts)
    starts = by_slot.cumsum(0) - by_slot
    shift = starts[slot] - (counts.cumsum(0) - counts)
    numbers = torch.arange(len(slots), device=here)
    expert = numbers.repeat_interleave(counts, output_size=rows)
    row = torch.arange(rows, device=here)
    place = row + shift[expert]
    return torch.empty_like(place).scatter_(0, place, row), place
