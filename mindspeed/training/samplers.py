"""Which sample each data-parallel rank reads when, in Megatron-LM's exact order.

Both samplers start after ``consumed`` samples, so a resumed run continues with the next
sample of the stopped one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mindspeed.errors import DataError


@dataclass(frozen=True)
class SamplerConfig:
    """Size of the data set, samples that are consumed, and this data-parallel rank's share."""

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

    def __init__(self, config: SamplerConfig) -> None:
        if config.consumed + config.step > config.total:
            raise DataError(
                f"the data set has {config.total} samples and {config.consumed} are consumed: "
                f"less than one micro-batch of all ranks ({config.step}) is left"
            )
        self._config = config

    def __iter__(self) -> Iterator[list[int]]:
        p = self._config
        for start in range(p.consumed, p.total - p.step + 1, p.step):
            first = start + p.rank * p.micro_batch_size
            yield list(range(first, first + p.micro_batch_size))


class CyclicSampler:
    """Samples reshuffled in every epoch, without end.

    With ``sharding`` every rank shuffles its own contiguous part; without, all ranks draw from one
    shuffled list.
    """

    def __init__(self, config: SamplerConfig, *, sharding: bool) -> None:
        if config.total < config.step:
            raise DataError(
                f"the data set has {config.total} samples, less than one micro-batch of all ranks "
                f"({config.step})"
            )
        self._config = config
        self._sharding = sharding

    def __iter__(self) -> Iterator[list[int]]:
        p = self._config
        per_epoch = p.total - p.total % p.step
        consumed = p.consumed
        while True:
            epoch, offset = divmod(consumed, per_epoch)
            order = self._order(epoch, offset)
            # All ranks end an epoch together, also if some have samples for one batch more.
            for step in range((per_epoch - offset) // p.step):
                consumed += p.step
                yield order[step * p.micro_batch_size : (step + 1) * p.micro_batch_size]

    def _order(self, epoch: int, offset: int) -> list[int]:
        """This rank's samples of one epoch, from ``offset`` samples of all ranks on."""
        p = self._config
        generator = torch.Generator()
        generator.manual_seed(epoch)
        if self._sharding:
            part = p.total // p.step * p.micro_batch_size
            shuffled = torch.randperm(part, generator=generator).tolist()
            return [p.rank * part + index for index in shuffled[offset // p.ranks :]]
        whole = p.total // p.micro_batch_size * p.micro_batch_size
        shuffled = torch.randperm(whole, generator=generator).tolist()
        return shuffled[offset:][p.rank :: p.ranks]


class SizedSampler:
    """Micro-batches of other sizes, with the samples of another sampler in its order.

    Args:
        sampler: yields equal micro-batches.
        sizes: samples of the micro-batches of a step; every step has the same.
    """

    def __init__(self, sampler: Iterable[list[int]], sizes: Sequence[int]) -> None:
        self._sampler, self._sizes = sampler, sizes

    def __iter__(self) -> Iterator[list[int]]:
        samples = itertools.chain.from_iterable(self._sampler)
        for size in itertools.cycle(self._sizes):
            micro_batch = list(itertools.islice(samples, size))
            if len(micro_batch) < size:
                return
            yield micro_batch
