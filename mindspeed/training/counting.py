"""How many tokens training really reads, where rows have padding or different lengths.

    positions   what is computed: rows x their length, padding included
    tokens      of samples, without padding
    pairs       of queries and keys that causal attention needs: half the square of every sample

Only the leader of a tensor-parallel group sees the rows, so every rank counts what it alone can see
and all sum up once per log interval (24 bytes).
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device


@dataclass(frozen=True)
class Counts:
    """Sums over all ranks; see the module."""

    positions: int
    tokens: int
    pairs: float


class FullRows:
    """Rows of plain text: all of one length and without padding."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._length = args.seq_length

    def watch(self, loader: Iterator[Any]) -> Iterator[Any]:
        """The loader itself: there is nothing to see."""
        return loader

    def count(self) -> None:
        """Nothing: ``take`` knows."""

    def take(self, samples: int) -> Counts:
        """Of so many rows."""
        tokens = samples * self._length
        return Counts(tokens, tokens, tokens * self._length / 2)


class CountedRows:
    """Rows of conversations, counted as they are trained: they may be read long before."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.int64)
        self._read: deque[torch.Tensor] = deque()

    def watch(self, loader: Iterator[Any]) -> Iterator[Any]:
        """The same batches; :meth:`count` counts them in their order."""
        for batch in loader:
            positions = torch.tensor([batch["tokens"].numel()])
            self._read.append(torch.cat([positions, batch["counts"]]))
            yield batch

    def count(self) -> None:
        """The first batch that was read and not counted is trained now."""
        self._sums += self._read.popleft()

    def take(self, samples: int) -> Counts:
        """Everything since the last call. Collective; ``samples`` is known from the rows."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        sums = sums.to(device.current().torch_device())
        dist.all_reduce(sums)
        positions, tokens, squares = sums.tolist()
        return Counts(positions, tokens, squares / 2)


def row_counts(items: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Tokens of all samples in some rows, and the sum of their squared lengths: int64 ``[2]``.

    Args:
        items: of :class:`mindspeed.data.instruction.InstructionDataset`; ``cu_seqlens`` are the
            borders of samples in a packed row.
    """
    lengths = [
        item["cu_seqlens"].diff().long() if "cu_seqlens" in item else item["tokens"].new_tensor([n])
        for item in items
        for n in [len(item["tokens"])]
    ]
    every = torch.cat(lengths)
    return torch.stack([every.sum(), every.square().sum()])
