"""One level of an exchange: a row goes once to each member of a group that owns experts of it.

    spread     a row for each (row, member), with the ids and weights of that member's experts
    dispatch   all-to-all of rows and of what belongs to them
    combine    all-to-all of the results back
    merge      the sum of the results of each row over members

A row's experts are numbers and weights (:mod:`mindspeed.moe.dispatch.compact`), which travel in one
tensor: the weights, and the bits of the ids in elements of the same dtype after them. Sums run in
fp32 and are rounded once, where they are sent on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed.moe.collectives import AllToAll
from mindspeed.moe.dispatch.compact import ID_DTYPE, chosen, within
from mindspeed.moe.interpreter import Chunk
from mindspeed.moe.split_phase import Collective
from mindspeed.moe.wire import PLAIN, Wire
from mindspeed.te import kernels


@dataclass(frozen=True)
class RowSpread:
    """Destinations of the rows of one level.

    Attributes:
        to: bool ``[rows, members]``, which members a row went to.
        copies: rows that were sent.
        shape: ``[rows, h]``.
    """

    row_id_map: torch.Tensor
    to: torch.Tensor
    copies: int
    shape: torch.Size


@dataclass(frozen=True)
class Level:
    """A group whose members own equal ranges of experts, in their order.

    Attributes:
        name: of its tensors and values in a chunk.
        experts: of all members; ids of arriving rows count from the first of them.
        width: places for experts of an arriving row.
        wire: how rows travel.
    """

    name: str
    group: dist.ProcessGroup
    experts: int
    width: int
    wire: Wire = PLAIN

    @property
    def members(self) -> int:
        """Ranks of the group."""
        return self.group.size()

    @property
    def per_member(self) -> int:
        """Experts of one member; ids of rows that it has received count from its first."""
        return self.experts // self.members

    @property
    def width_after(self) -> int:
        """Places for experts of a row that a member has received."""
        return min(self.width, self.per_member)

    def destinations(self, ids: torch.Tensor) -> torch.Tensor:
        """The members that rows with ``ids [n, width]`` go to, bool ``[n, members]``."""
        member = torch.div(ids, self.per_member, rounding_mode="floor")
        return chosen(member, self.members)

    def spread(
        self, chunk: Chunk, ids: torch.Tensor, weights: torch.Tensor, copies: int | None = None
    ) -> None:
        """Copy rows for the members.

        Args:
            chunk: ``rows [n, h]`` become ``rows [copies, h]`` and ``metadata [copies, ...]``.
            ids: Experts of the rows, ``[n, width]``.
            weights: ``[n, width]``.
            copies: Their number, if it is known on the host.
        """
        tensors = chunk.tensors
        to = self.destinations(ids)
        source, member = _places(to, copies)
        ids, weights = within(
            ids.index_select(0, source),
            weights.index_select(0, source),
            (member * self.per_member).unsqueeze(1),
            self.per_member,
            self.width_after,
        )
        tensors["metadata"] = join(ids, weights)
        shape, count = tensors["rows"].shape, source.shape[0]
        tensors["rows"], _, row_id_map = kernels.moe_permute(tensors["rows"], None, to, count)
        chunk.values[self.name] = RowSpread(row_id_map, to, count, shape)

    def dispatch(self, sent: Sequence[int], received: Sequence[int]) -> Mapping[str, Collective]:
        """Rows and their metadata to the members.

        Args:
            sent: Rows for each member.
            received: Rows from each.
        """
        if self.members == 1:
            return {}
        exchange = AllToAll(self.group, sent, received)
        return {"metadata": exchange, "rows": self.wire.tokens(exchange)}

    def arrived(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of the rows that have come, ``[received, width_after]`` each."""
        return take_apart(chunk.tensors.pop("metadata"), self.width_after)

    def combine(self, sent: Sequence[int], received: Sequence[int]) -> Mapping[str, Collective]:
        """The results back; ``sent`` and ``received`` are those of :meth:`dispatch`."""
        if self.members == 1:
            return {}
        return {"rows": self.wire.results(AllToAll(self.group, received, sent))}

    def again(self, sent: Sequence[int], received: Sequence[int]) -> Sequence[Collective]:
        """What brings the rows alone once more; arguments as in :meth:`dispatch`."""
        exchange = AllToAll(self.group, sent, received)
        return [] if self.members == 1 else [self.wire.tokens(exchange)]

    def merge(self, chunk: Chunk) -> None:
        """``rows [copies, h]`` to the sums over members, ``[n, h]``."""
        done: RowSpread = chunk.values[self.name]
        chunk.tensors["rows"] = sum_rows(
            chunk.tensors["rows"], done.row_id_map, done.to, done.shape
        )


def sum_rows(
    rows: torch.Tensor, row_id_map: torch.Tensor, to: torch.Tensor, shape: Sequence[int]
) -> torch.Tensor:
    """Sum the copies of each row in fp32, with one rounding.

    Args:
        rows: ``[copies, h]``, floating dtype.
        row_id_map: Of the permutation that made the copies.
        to: bool ``[n, columns]``, what was permuted by.
        shape: ``[n, h]``.

    Returns:
        ``[n, h]`` in the dtype of ``rows``.
    """
    # Weights of one in fp32: the kernels sum in the wider of the two dtypes.
    ones = to.to(torch.float32) if rows.dtype.itemsize < 4 else None
    return kernels.moe_unpermute(rows, row_id_map, ones, shape)


def join(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``ids [n, w]`` and ``weights [n, w]`` in one tensor ``[n, ...]`` in the weights' dtype."""
    room = -ids.shape[1] * ID_DTYPE.itemsize % weights.dtype.itemsize // ID_DTYPE.itemsize
    bits = torch.nn.functional.pad(ids, (0, room)).contiguous().view(weights.dtype)
    return torch.cat([weights, bits], dim=1)


def take_apart(metadata: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of :func:`join`: ids and weights, ``[n, width]`` each."""
    bits = metadata.detach()[:, width:].contiguous()
    return bits.view(ID_DTYPE)[:, :width], metadata[:, :width]


def metadata_bytes(width: int, weight: int = 4) -> int:
    """Bytes of the metadata of one row with ``width`` places and weights of ``weight`` bytes."""
    return width * weight + -(-width * ID_DTYPE.itemsize // weight) * weight


def _places(to: torch.Tensor, copies: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The row and the member of every copy, sorted by member and by row: int64 ``[copies]``."""
    flat = to.t().reshape(-1)
    if copies is None:
        place = flat.nonzero().squeeze(1)
    else:  # without a wait for the device
        order = torch.argsort(flat.to(torch.int8), descending=True, stable=True)
        place = order[:copies]
    rows = max(to.shape[0], 1)
    return place % rows, torch.div(place, rows, rounding_mode="floor")
