"""Which sample each data-parallel rank reads when, in Megatron-LM's exact order.

Both samplers start after ``consumed`` samples, so a run that resumes continues with the very sample
the stopped one would have read next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mindspeed.errors import DataError


@dataclass(frozen=True)
class Portion:
    """Where this rank's samples are in the stream of all ranks."""

    total: int
    consumed: int
    micro_batch_size: int
    rank: int
    ranks: int

    @property
    def step(self) -> int:
        """Samples that all ranks together read for one micro-batch each."""
        return self.micro_batch_size * self.ranks


class SequentialSampler:
    """Samples in order, once; an incomplete last micro-batch is left out.

    Raises:
        DataError: nothing is left to read.
    """

    def __init__(self, portion: Portion) -> None:
        if portion.consumed + portion.step > portion.total:
            raise DataError(
                f"the data set has {portion.total} samples and {portion.consumed} are consumed: "
                f"less than one micro-batch of all ranks ({portion.step}) is left"
            )
        self._portion = portion

    def __iter__(self) -> Iterator[list[int]]:
        p = self._portion
        for start in range(p.consumed, p.total - p.step + 1, p.step):
            first = start + p.rank * p.micro_batch_size
            yield list(range(first, first + p.micro_batch_size))


class CyclicSampler:
    """Samples shuffled anew in every epoch, epoch after epoch without end.

    With ``sharding`` every rank shuffles its own contiguous part; without, all ranks draw from one
    shuffled list.
    """

    def __init__(self, portion: Portion, *, sharding: bool) -> None:
        if portion.total < portion.step:
            raise DataError(
                f"the data set has {portion.total} samples, less than one micro-batch of all ranks "
                f"({portion.step})"
            )
        self._portion = portion
        self._sharding = sharding

    def __iter__(self) -> Iterator[list[int]]:
        p = self._portion
        per_epoch = p.total - p.total % p.step
        consumed = p.consumed
        while True:
            epoch, offset = divmod(consumed, per_epoch)
            order = self._order(epoch, offset)
            for first in range(0, len(order) - p.micro_batch_size + 1, p.micro_batch_size):
                consumed += p.step
                yield order[first : first + p.micro_batch_size]

    def _order(self, epoch: int, offset: int) -> list[int]:
        """This rank's samples of one epoch, from ``offset`` samples of all ranks on."""
        p = self._portion
        generator = torch.Generator()
        generator.manual_seed(epoch)
        if self._sharding:
            part = p.total // p.step * p.micro_batch_size
            shuffled = torch.randperm(part, generator=generator).tolist()
            return [p.rank * part + index for index in shuffled[offset // p.ranks :]]
        whole = p.total // p.micro_batch_size * p.micro_batch_size
        shuffled = torch.randperm(whole, generator=generator).tolist()
        return shuffled[offset:][p.rank :: p.ranks]
