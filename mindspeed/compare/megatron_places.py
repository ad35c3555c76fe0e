"""Places of the shards of Megatron's tensors in the whole tensor.

Activations are ``[tokens, samples, ...]``, and row ``token * samples + sample`` of the whole one.
Which tokens a rank has follows from the packed batch or from Megatron's zigzag chunks; sequence
parallelism takes a chunk of these. Columns are the shards of tensor parallelism. Parameters tell
their places themselves, as for a checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.attention.sequence_sharding import zigzag
from mindspeed.compare.digest import Elements


@dataclass(frozen=True)
class Ranks:
    """This rank's place in the groups that share a sequence.

    Attributes:
        tp: Tensor-parallel rank.
        tp_size: Tensor-parallel ranks.
        cp: Context-parallel rank.
        cp_size: Context-parallel ranks.
        dp: Data-parallel rank.
        dp_size: Data-parallel ranks, which have different samples.
        pp: Pipeline stage.
        pp_size: Pipeline stages.
        sequence: The tensor-parallel ranks share the sequence, too.
    """

    tp: int
    tp_size: int
    cp: int
    cp_size: int
    dp: int
    dp_size: int
    pp: int
    pp_size: int
    sequence: bool

    @classmethod
    def of_job(cls, config: Any) -> Ranks:
        """Those of Megatron's groups."""
        from megatron.core import parallel_state as state

        return cls(
            state.get_tensor_model_parallel_rank(),
            state.get_tensor_model_parallel_world_size(),
            state.get_context_parallel_rank(),
            state.get_context_parallel_world_size(),
            state.get_data_parallel_rank(),
            state.get_data_parallel_world_size(),
            state.get_pipeline_model_parallel_rank(),
            state.get_pipeline_model_parallel_world_size(),
            bool(config.sequence_parallel),
        )


class MicroBatchRows:
    """Rows of the activations of one micro-batch on this rank.

    Args:
        ranks: Of this rank.
        samples: b.
        length: Tokens of a sample on this context-parallel rank.
        packed: The packed batch that says which; None for zigzag chunks.
    """

    def __init__(self, ranks: Ranks, samples: int, length: int, packed: Any = None) -> None:
        self._ranks, self.samples, self.length = ranks, samples, length
        if packed is None:
            size = length * ranks.cp_size
            tokens = zigzag(size, ranks.cp_size).positions(ranks.cp) if ranks.cp_size > 1 else None
            tokens = torch.arange(size) if tokens is None else tokens
            rows = tokens[:, None] * samples + torch.arange(samples)
        else:
            size = packed.size
            place = packed.rows(ranks.cp).view(samples, length).t()
            rows = (place % size) * samples + place // size
        self.total = size * samples
        self._rows = {length: rows.reshape(-1)}
        if ranks.sequence and ranks.tp_size > 1 and length % ranks.tp_size == 0:
            part = rows.chunk(ranks.tp_size)[ranks.tp]
            self._rows[length // ranks.tp_size] = part.reshape(-1)
        self._places: dict[tuple[int, Any], Elements] = {}
        self._samples: dict[int, list[tuple[torch.Tensor, Elements]]] = {}

    def place(self, tokens: int, columns: RankColumns) -> Elements | None:
        """Place of ``[tokens, b, ...]``; None if no sharding has so many tokens."""
        rows = self._rows.get(tokens)
        if rows is None:
            return None
        key = tokens, columns
        if key not in self._places:
            self._places[key] = Elements(
                (self.total, columns.total), rows, columns.index(), partial=columns.partial
            )
        return self._places[key]

    def by_sample(self, place: Elements) -> list[tuple[torch.Tensor, Elements]]:
        """The rows of each sample in a place of this micro-batch, and their place in the sample."""
        if id(place) not in self._samples:
            self._samples[id(place)] = by_sample(place, self.samples)
        return self._samples[id(place)]


def by_sample(place: Elements, samples: int) -> list[tuple[torch.Tensor, Elements]]:
    """A place as those of its samples, whose rows alternate: ``[rows]`` int64 of each, and a place.

    Args:
        place: Of a micro-batch, or of all experts.
        samples: Of the micro-batch.
    """
    found = []
    for sample in range(samples):
        here = (place.rows % samples == sample).nonzero().view(-1)
        shape = place.shape[0] // samples, place.shape[1]
        rows = place.rows[here].div(samples, rounding_mode="floor")
        own = Elements(shape, rows, place.columns, place.sparse, place.partial)
        found.append((here, own))
    return found


@dataclass(frozen=True)
class RankColumns:
    """The columns of a rank: part ``part`` of ``parts`` of each of ``halves`` equal ranges.

    Attributes:
        total: Of the whole tensor.
        part: Of this rank.
        parts: Ranks with different ones.
        halves: 2 for gate and up, which are one after the other in the whole tensor.
        partial: Ranks with the same columns have terms of a sum.
    """

    total: int
    part: int = 0
    parts: int = 1
    halves: int = 1
    partial: bool = False

    def index(self) -> torch.Tensor:
        """Global column of each column of the rank: ``[columns]`` int64."""
        halves = torch.arange(self.total).chunk(self.halves)
        return torch.cat([half.chunk(self.parts)[self.part] for half in halves])


class RowsOf(RankColumns):
    """Columns of a product in the order of its weight's rows, which a rank may have from several.

    Args:
        place: Of the weight, on this rank.
    """

    def __init__(self, place: Elements) -> None:
        super().__init__(place.shape[0])
        object.__setattr__(self, "_rows", place.rows)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def index(self) -> torch.Tensor:
        """Global column of each column of the rank: ``[columns]`` int64."""
        rows: torch.Tensor = self.__dict__["_rows"]
        return rows


@functools.lru_cache(maxsize=8)
def _unpacked(ranks: Ranks, samples: int, length: int) -> MicroBatchRows:
    return MicroBatchRows(ranks, samples, length)


def rows_of(ranks: Ranks, samples: int, length: int, packed: Any) -> MicroBatchRows:
    """Rows of a micro-batch; those of samples without packing are kept."""
    if packed is None:
        return _unpacked(ranks, samples, length)
    return MicroBatchRows(ranks, samples, length, packed)


def parameter_places(chunk: Any) -> dict[str, Elements]:
    """Place of each parameter of a chunk, by its name in the chunk.

    A parameter whose place is no rectangle, or that a checkpoint does not have, is left out.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    by_storage: dict[tuple[int, torch.Size], Any] = {}
    for entry in _entries(_sharded_state(chunk)):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data is not None:
            by_storage[entry.data.data_ptr(), entry.data.shape] = entry
    found = {}
    for name, parameter in chunk.named_parameters():
        entry = by_storage.get((parameter.data_ptr(), parameter.shape))
        place = None if entry is None else _place_of(entry, parameter.shape)
        if place is not None:
            found[name] = place
    return found


def whole_parameters(chunks: list[Any]) -> set[Any]:
    """Parameters that a rank holds whole, so that all ranks with them have copies.

    Args:
        chunks: Of the model, without wrappers.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    found = set()
    for chunk in chunks:
        whole = {
            entry.data.data_ptr()
            for entry in _entries(_sharded_state(chunk))
            if isinstance(entry, ShardedTensor) and entry.data is not None
            if tuple(entry.global_shape[entry.prepend_axis_num :]) == tuple(entry.data.shape)
        }
        found |= {one for one in chunk.parameters() if one.data_ptr() in whole}
    return found


def _sharded_state(chunk: Any) -> Any:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return chunk.sharded_state_dict(metadata={"dp_cp_group": group})


def _entries(state: Any) -> Iterator[Any]:
    """All values of a nested state dict."""
    if isinstance(state, Mapping):
        for value in state.values():
            yield from _entries(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _entries(value)
    else:
        yield state


def _place_of(entry: Any, shape: torch.Size) -> Elements | None:
    """The place of what a parameter's entry in a checkpoint holds."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    numbers = torch.arange(shape.numel()).view(shape)
    if isinstance(entry, ShardedTensorFactory):
        built = entry.build_fn(entry.key, numbers, entry.replica_id, entry.flattened_range)
        pieces = [(one.data, one) for one in _entries(built) if isinstance(one, ShardedTensor)]
    else:
        pieces = [(numbers, entry)]
    return place_of_pieces(pieces, shape[0])


def place_of_pieces(
    pieces: Sequence[tuple[torch.Tensor | None, Any]], rows: int
) -> Elements | None:
    """The place of a parameter whose rows are pieces of a checkpoint's tensors.

    Args:
        pieces: Each the numbers of its elements in the flattened parameter ``[rows, ...]``,
            and its entry in a checkpoint, a ``ShardedTensor``.
        rows: Of the parameter.

    Returns:
        None if it is no rectangle.
    """
    count = sum(0 if own is None else own.numel() for own, _ in pieces)
    local_columns = count // rows if rows else 0
    index = torch.full((rows,), -1)
    columns = None
    bases: dict[str, int] = {}  # tensors of other names in a checkpoint stand below each other
    height = 0
    for own, piece in pieces:
        offset = piece.global_offset[piece.prepend_axis_num :]
        size = piece.global_shape[piece.prepend_axis_num :]
        if own is None or own.dim() != len(size) or not _in_two_dimensions(offset, own.shape, size):
            return None
        wide = _product(size[1:])
        start = offset[1] * _product(size[2:]) if len(size) > 1 else 0
        across = torch.arange(_product(own.shape[1:])) + start
        if columns is not None and not torch.equal(columns, across):
            return None
        columns = across
        local = own.reshape(own.shape[0], -1)[:, 0] // local_columns
        if piece.key not in bases:
            bases[piece.key] = height
            height += size[0]
        index[local] = torch.arange(own.shape[0]) + offset[0] + bases[piece.key]
        whole = height, wide
    if columns is None or (index < 0).any() or len(columns) != local_columns:
        return None
    return Elements(whole, index, columns)


def _in_two_dimensions(offset: Any, own: Any, size: Any) -> bool:
    """Whether only the first two dimensions are sharded."""
    return all(a == 0 and b == c for a, b, c in zip(offset[2:], own[2:], size[2:], strict=True))


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= int(size)
    return total


def rectangles(place: Elements, start: int, end: int) -> Iterator[tuple[int, int, Elements]]:
    """A flat range of a piece as at most three rectangles.

    Args:
        place: Of the piece.
        start: First element, in the order of the piece's rows.
        end: After the last one.

    Yields:
        First and last element of a rectangle, and its place.
    """
    width = len(place.columns)
    while start < end:
        row, column = divmod(start, width)
        if column or end - start < width:
            stop = min(end, (row + 1) * width)
            rows, columns = place.rows[row : row + 1], place.columns[column : column + stop - start]
        else:
            count = (end - start) // width
            stop = start + count * width
            rows, columns = place.rows[row : row + count], place.columns
        yield start, stop, Elements(place.shape, rows, columns)
        start = stop
