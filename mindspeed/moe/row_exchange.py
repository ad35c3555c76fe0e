"""How rows travel between the ranks of experts when only the device knows how many they are.

    EqualBlocks       all-to-all of a bound for each rank, filled with zeros; every device
    SymmetricMemory   the rows and no others, by sizes on the device; NVIDIA GPUs
                      (:mod:`mindspeed.moe.symmetric_memory`)

A buffer has the rows for each rank one after the other, sorted by expert; an exchange says how many
rows of nobody follow those for a rank. Grouped products (:mod:`mindspeed.te.device_groups`) keep
nobody's rows out of everything else. The dispatcher (:mod:`mindspeed.moe.dispatch.device_sizes`)
is the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from mindspeed.moe.collectives import AllToAll
from mindspeed.moe.split_phase import Collective


@dataclass(frozen=True)
class DeviceRows:
    """Rows that one rank exchanges with all others.

    Attributes:
        group: of R ranks.
        bound: the most rows that a rank sends another, or gets from it.
        sent: int64 ``[R]`` on the device, rows for each rank.
        received: int64 ``[R]`` on the device, rows of each rank.
        send_length: rows of the buffer that is sent.
        receive_length: rows of the buffer that is received.
    """

    group: dist.ProcessGroup
    bound: int
    sent: torch.Tensor
    received: torch.Tensor
    send_length: int
    receive_length: int

    def back(self) -> DeviceRows:
        """The same rows on their way back."""
        return replace(
            self,
            sent=self.received,
            received=self.sent,
            send_length=self.receive_length,
            receive_length=self.send_length,
        )


class RowExchange(Protocol):
    """A way for rows to travel."""

    def padding(self, rows: torch.Tensor, bound: int) -> torch.Tensor:
        """Rows of nobody after the ``rows [R]`` for each rank, ``[R]``; int64 on the device."""
        ...

    def send_length(self, bound: int, ranks: int, most: int) -> int:
        """Rows of a buffer with at most ``most`` rows for ``ranks`` ranks, ``bound`` for each."""
        ...

    def collective(self, rows: DeviceRows) -> Collective:
        """Move rows to the ranks they are for; behind the last that arrives lies anything."""
        ...


@dataclass(frozen=True)
class EqualBlocks:
    """All-to-all of equal blocks, each as long as the bound."""

    def padding(self, rows: torch.Tensor, bound: int) -> torch.Tensor:
        """What is left of the blocks behind ``rows [R]``, ``[R]``."""
        return bound - rows

    def send_length(self, bound: int, ranks: int, most: int) -> int:
        """A block for each rank."""
        return ranks * bound

    def collective(self, rows: DeviceRows) -> Collective:
        """All-to-all with sizes that the host knows."""
        blocks = [rows.bound] * rows.group.size()
        return AllToAll(rows.group, blocks, blocks)


EQUAL_BLOCKS = EqualBlocks()
