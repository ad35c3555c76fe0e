"""Slices of the tokens of a layer, each with rows for every expert.

    by tokens      slice j has a part of the tokens, with all their rows; results are concatenated
    by capacity    slice j has a part of every expert's slots, of all tokens; results are added

The second is for padded dispatch, where every slice is as long on all ranks without counting.
"""

from __future__ import annotations

from math import ceil

import torch

from mindspeed.errors import ConfigError
from mindspeed.moe.dispatch.all_to_all import AllToAllDispatcher
from mindspeed.moe.dispatch.padded import PaddedDispatcher, Slots
from mindspeed.moe.interpreter import Chunk

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
