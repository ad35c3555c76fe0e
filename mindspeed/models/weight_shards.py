"""How a Megatron parameter is put together from rows of Hugging Face tensors.

    linear_qkv = [ q of group 0 | k of group 0 | v of group 0 | q of group 1 | ... ]
    linear_fc1 = [ gate | up ]
    embedding  = [ vocabulary | zeros up to the padded size ]

A :data:`ShardMap` is a function from the model's :class:`Shape` to such a list of
:class:`RowSegment`, concatenated along the rows. Converting copies segments, converting back copies
them the other way, and a tensor-parallel rank that holds rows ``a`` to ``b`` reads the segments
that overlap them. Columns are never reordered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from mindspeed.models.shape import Shape


@dataclass(frozen=True)
class RowSegment:
    """Rows ``start`` to ``start + count`` of tensor ``name``; rows of zeros without a name.

    ``size`` is the name of the size that the tensor's number of rows comes from; ``rows`` that
    number, where the parameter does not have the tensor's last row.
    """

    name: str | None
    start: int
    count: int
    size: str | None = None
    rows: int = 0


ShardMap = Callable[[Shape], tuple[RowSegment, ...]]


def whole(name: str, rows: str) -> ShardMap:
    """The tensor as it is; ``rows`` is the name of its size."""
    return lambda shape: (RowSegment(name, 0, shape[rows], rows),)


def stacked(names: Sequence[str], rows: str) -> ShardMap:
    """Several tensors of ``rows`` rows, concatenated."""
    return lambda shape: tuple(RowSegment(name, 0, shape[rows], rows) for name in names)


def padded_vocabulary(name: str) -> ShardMap:
    """One row per token, then zeros up to the padded size."""

    def shard_map(shape: Shape) -> tuple[RowSegment, ...]:
        real, padding = shape["vocab"], shape["padded_vocab"] - shape["vocab"]
        tokens = RowSegment(name, 0, real, "vocab")
        return (tokens, RowSegment(None, 0, padding)) if padding else (tokens,)

    return shard_map


def grouped_qkv(query: str, key: str, value: str) -> ShardMap:
    """Per key/value head: its query heads, then the key, then the value."""

    def shard_map(shape: Shape) -> tuple[RowSegment, ...]:
        return tuple(_groups(shape, (query, key, value), (0, 0, 0)))

    return shard_map


def grouped_pack(name: str) -> ShardMap:
    """Like :func:`grouped_qkv`, from one tensor ``[all q; all k; all v]``."""

    def shard_map(shape: Shape) -> tuple[RowSegment, ...]:
        first_key = shape["query"]
        starts = (0, first_key, first_key + shape["key"])
        return tuple(_groups(shape, (name, name, name), starts))

    return shard_map


def _groups(
    shape: Shape, names: tuple[str, str, str], starts: tuple[int, int, int]
) -> Iterator[RowSegment]:
    groups = shape["key"] // shape["head"]
    counts = (shape["query"] // groups, shape["head"], shape["head"])
    sizes = ("query", "key", "key")
    for group in range(groups):
        for name, start, count, size in zip(names, starts, counts, sizes, strict=True):
            yield RowSegment(name, start + group * count, count, size)


def gated_qkv(query: str, key: str, value: str) -> ShardMap:
    """A :func:`grouped_qkv` of queries whose tensor has the gate of a head behind each head.

    Per key/value head: its query heads, then their gates, then the key, then the value.
    """

    def shard_map(shape: Shape) -> tuple[RowSegment, ...]:
        head, groups = shape["head"], shape["key"] // shape["head"]
        heads = shape["query"] // shape["key"]
        segments = []
        for group in range(groups):
            first = group * heads
            for part in (0, 1):  # query, gate
                segments += [
                    RowSegment(query, (2 * (first + i) + part) * head, head, "gated_query")
                    for i in range(heads)
                ]
            segments += [RowSegment(name, group * head, head, "key") for name in (key, value)]
        return tuple(segments)

    return shard_map


def delta_part(name: str, part: Literal["query", "key", "value", "z", "beta", "alpha"]) -> ShardMap:
    """A part of the joint projections of a gated delta net (Qwen3-Next).

    Per key head the tensor has [query | key | value heads | z heads], or [beta | alpha] of the
    value heads that share the key head.
    """

    def shard_map(shape: Shape) -> tuple[RowSegment, ...]:
        heads = shape["delta_key_heads"]
        share = shape["delta_heads"] // heads
        key, value = shape["delta_key"] // heads, shape["delta_value"] // heads
        small = part in ("beta", "alpha")
        counts = (
            {"beta": share, "alpha": share}
            if small
            else {"query": key, "key": key, "value": value, "z": value}
        )
        names = list(counts)
        first = sum(counts[other] for other in names[: names.index(part)])
        step = sum(counts.values())
        rows = heads * step
        return tuple(
            RowSegment(name, i * step + first, counts[part], None, rows) for i in range(heads)
        )

    return shard_map


def part_of(name: str, parts: Sequence[str], index: int) -> ShardMap:
    """One of the parts that a tensor's rows consist of, these by the names of their sizes."""

    def shard_map(shape: Shape) -> tuple[RowSegment, ...]:
        counts = [shape[size] for size in parts]
        start = sum(counts[:index])
        return (RowSegment(name, start, counts[index], parts[index], sum(counts)),)

    return shard_map


def total_rows(segments: Sequence[RowSegment]) -> int:
    """Number of rows of the Megatron parameter."""
    return sum(segment.count for segment in segments)


def overlap(
    segments: Sequence[RowSegment], start: int, count: int
) -> Iterator[tuple[RowSegment, int]]:
    """The segments that rows ``start`` to ``start + count`` of a parameter consist of.

    Yields:
        A segment clipped to the range, and its first row relative to ``start``.
    """
    position = 0
    for segment in segments:
        first = max(start, position)
        last = min(start + count, position + segment.count)
        if first < last:
            clipped = RowSegment(segment.name, segment.start + first - position, last - first)
            yield clipped, first - start
        position += segment.count


def source_rows(segments: Sequence[RowSegment]) -> dict[str, int]:
    """Number of rows of each source tensor; padding has none."""
    rows: dict[str, int] = {}
    for segment in segments:
        if segment.name is not None:
            end = max(segment.start + segment.count, segment.rows)
            rows[segment.name] = max(rows.get(segment.name, 0), end)
    return rows


def split(tensor: torch.Tensor, segments: Sequence[RowSegment]) -> dict[str, torch.Tensor]:
    """The Hugging Face tensors of a whole Megatron parameter.

    Args:
        tensor: ``[rows]`` or ``[rows, columns]``, any dtype.
        segments: Where its rows come from.

    Returns:
        Name -> tensor of the same dtype; a view of ``tensor`` where its rows are contiguous there.
    """
    sizes = source_rows(segments)
    result: dict[str, torch.Tensor] = {}
    position = 0
    for segment in segments:
        if segment.name is not None:
            part = tensor[position : position + segment.count]
            rows = sizes[segment.name]
            if segment.count == rows:
                result[segment.name] = part
            else:
                if segment.name not in result:
                    result[segment.name] = tensor.new_empty(rows, *tensor.shape[1:])
                result[segment.name][segment.start : segment.start + segment.count] = part
        position += segment.count
    return result


def joined(
    parameters: Iterable[tuple[torch.Tensor, Sequence[RowSegment]]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The Hugging Face tensors of several parameters, of which some share one.

    Args:
        parameters: A whole parameter ``[rows, ...]``, and where its rows come from.

    Yields:
        Name and tensor, as soon as all rows of it are there.
    """
    waiting: dict[str, tuple[torch.Tensor, int]] = {}
    for tensor, segments in parameters:
        counts: dict[str, int] = {}
        for segment in segments:
            if segment.name is not None:
                counts[segment.name] = counts.get(segment.name, 0) + segment.count
        for name, part in split(tensor, segments).items():
            if counts[name] == len(part):
                yield name, part
                continue
            whole, missing = waiting.get(name, (part, len(part)))
            for segment in segments:
                if segment.name == name:
                    rows = slice(segment.start, segment.start + segment.count)
                    whole[rows] = part[rows]
            missing -= counts[name]
            if missing:
                waiting[name] = (whole, missing)
            else:
                del waiting[name]
                yield name, whole


def with_tensors(
    tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor], segments: Sequence[RowSegment]
) -> torch.Tensor:
    """A whole Megatron parameter with other values for some of its Hugging Face tensors.

    Args:
        tensor: ``[rows]`` or ``[rows, columns]``, any dtype; it is not changed.
        tensors: Name -> values of the same columns, any dtype; names of others may be there.
        segments: Where its rows come from.

    Returns:
        A tensor of the same shape and dtype; ``tensor`` itself if it has none of the names.
    """
    if not any(segment.name in tensors for segment in segments):
        return tensor
    result, position = tensor.clone(), 0
    for segment in segments:
        if segment.name is not None and segment.name in tensors:
            own = tensors[segment.name][segment.start : segment.start + segment.count]
            result[position : position + segment.count] = own
        position += segment.count
    return result
