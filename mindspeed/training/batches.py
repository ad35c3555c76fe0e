"""Micro-batches of one pipeline stage: read, broadcast over TP ranks, sharded over CP ranks.

Tensor-parallel rank 0 reads and sends ONE broadcast of 8-byte words (Megatron-LM: one per tensor,
and an s x s mask), after one of 16 bytes with the shape where lengths vary:

    first stage   tokens                            b * s * 8 bytes
    last stage    labels, loss mask                 b * s * 16 bytes
    all stages    where documents begin, if packed  b * s * 8 bytes

Where lengths vary, every stage reads and has the lengths of all micro-batches of a step before
it starts: stages exchange no shapes (:mod:`mindspeed.pipeline.megatron_lengths`).

Where context-parallel ranks share packed documents, every micro-batch has its own sharding and
attention plan. Of the announced micro-batches (:meth:`MicroBatches.announce`) one is read ahead,
and a thread plans it while the ranks train on the current one.

Each rank computes positions itself, and the mask belongs to the attention. Packed documents keep
the shape [b, s]: ``packed_seq_params`` tells every layer where documents begin, and which tokens
the ranks of a context-parallel group have (:mod:`mindspeed.attention.packed_batch`).
"""

from __future__ import annotations

import argparse
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mindspeed import session
from mindspeed.adaptor.micro_batch import FullBatch, plan_batch, read_batch, shard_batch
from mindspeed.adaptor.versions.batch_functions import zigzag_chunks
from mindspeed.attention.packed_batch import CuSeqlens, cu_seqlens_of_starts
from mindspeed.errors import DataError
from mindspeed.flags import read
from mindspeed.job import Batch, Parallel
from mindspeed.training.options import DataOptions


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


MicroBatch = dict[str, Any]  # tensors; None for those that a stage does not need


@dataclass(frozen=True)
class _Ahead:
    """A micro-batch that was read ahead, and the future of its attention plan, if any."""

    read: FullBatch
    planned: Future[None] | None = None


class MicroBatches(Iterator[MicroBatch]):
    """The micro-batches of one pipeline stage on this rank, without end for a cyclic reader.

    Args:
        args: final values.
        loader: yields collated samples on tensor-parallel rank 0; None on other ranks.
        tokenizer: names the token that ends a document.
        pre_process: the stage embeds tokens.
        post_process: the stage computes the loss.
        trained: called for each micro-batch when it is requested.
        sizes: samples of the micro-batches of a step, where they differ; the loader yields as many.
        more: names of further tensors that the loss needs.

    Attributes:
        micro_batch_sizes: ``sizes``.
        post_process: the stage computes the loss.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        loader: Iterator[Any] | None,
        tokenizer: Any,
        *,
        pre_process: bool,
        post_process: bool,
        trained: Callable[[], None] | None = None,
        sizes: Sequence[int] | None = None,
        more: Sequence[str] = (),
    ) -> None:
        options = read(DataOptions, args)
        self._trained = trained
        self._loader = loader
        self._length = None if options.variable_seq_lengths else options.seq_length
        self._reading: dict[str, Any] = {
            "pre_process": pre_process,
            "post_process": post_process,
            "documents": _samples_and_padding if options.is_instruction_dataset else None,
            "more": more,
        }
        self.micro_batch_sizes = sizes
        self.post_process = post_process
        self._sizes = itertools.cycle(sizes or (Batch.of(args).micro,))
        self._tokenizer = tokenizer
        self._ahead: deque[_Ahead] = deque()
        self._announced = 0
        self._planner: ThreadPoolExecutor | None = None
        if Parallel.of(args).context > 1 and session.install().seams.documents.functions:
            self._planner = ThreadPoolExecutor(1, thread_name_prefix="plan-ahead")
        self._reset_mask = options.reset_attention_mask or options.pack_sequences
        self._reset_positions = options.reset_position_ids or options.pack_sequences

    def __next__(self) -> MicroBatch:
        batch = self._ahead.popleft() if self._ahead else self._read()
        self._announced -= 1
        if self._planner and self._announced > 0 and not self._ahead:
            self._ahead.append(self._read())
        if batch.planned is not None:
            batch.planned.result()
        if self._trained is not None:
            self._trained()
        return self.on_this_rank(batch.read)

    def announce(self, count: int) -> None:
        """Announce that at least ``count`` micro-batches will be requested (bounds prefetch)."""
        self._announced = count

    def ahead(self, count: int) -> list[FullBatch]:
        """The next ``count`` micro-batches, before context-parallel sharding."""
        while len(self._ahead) < count:
            self._ahead.append(self._read())
        return [batch.read for batch in list(self._ahead)[:count]]

    def lengths_ahead(self, count: int) -> list[int]:
        """Lengths of the next ``count`` micro-batches, summed over context-parallel ranks."""
        return [batch.seq_length for batch in self.ahead(count)]

    def preview(self, count: int) -> Preview:
        """The next ``count`` micro-batches, which are read again later."""
        return Preview(self, count)

    def _read(self) -> _Ahead:
        seams, samples = session.install().seams, next(self._sizes)
        shape = None if self._length is None else (samples, self._length)
        batch = read_batch(seams, self._loader, self._tokenizer, shape=shape, **self._reading)
        if self._planner is None or batch.cu_seqlens is None:
            return _Ahead(batch)
        planning = self._planner.submit(
            plan_batch, batch.cu_seqlens, batch.samples, reset_mask=self._reset_mask
        )
        return _Ahead(batch, planning)

    def on_this_rank(self, read: FullBatch) -> MicroBatch:
        """This rank's part of a micro-batch."""
        batch: MicroBatch = {
            **read.tensors,
            "attention_mask": None,
            "position_ids": read.position_ids,
        }
        if read.cu_seqlens is None:
            return zigzag_chunks(batch)
        part, packed_seq_params = shard_batch(
            batch,
            read.cu_seqlens,
            read.samples,
            reset_mask=self._reset_mask,
            reset_positions=self._reset_positions,
        )
        return {**part, "packed_seq_params": packed_seq_params}


class ReadsAhead(Protocol):
    """A reader whose micro-batches can be looked at before they are trained."""

    def ahead(self, count: int) -> list[FullBatch]:
        """The next ``count`` micro-batches, before context-parallel sharding."""

    def lengths_ahead(self, count: int) -> list[int]:
        """Lengths of the next ``count`` micro-batches, summed over context-parallel ranks."""

    def on_this_rank(self, read: FullBatch) -> MicroBatch:
        """This rank's part of a micro-batch."""


class Preview(Iterator[MicroBatch]):
    """Micro-batches for a pass before that of training, which reads the same ones.

    Args:
        reader: that training reads.
        count: of micro-batches.
    """

    def __init__(self, reader: ReadsAhead, count: int) -> None:
        self._reader = reader
        self._rest = iter(reader.ahead(count))

    def __next__(self) -> MicroBatch:
        return self._reader.on_this_rank(next(self._rest))

    def lengths_ahead(self, count: int) -> list[int]:
        """Lengths of the next ``count`` micro-batches, summed over context-parallel ranks."""
        return self._reader.lengths_ahead(count)


def _samples_and_padding(sample: Any) -> CuSeqlens:
    """CuSeqlens of conversations and of the padding after them: positions restart at 0."""
    return cu_seqlens_of_starts(sample["position_ids"] == 0)
