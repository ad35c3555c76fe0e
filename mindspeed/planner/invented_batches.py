"""Micro-batches of invented tokens for the trainer: one reader for each model chunk of a rank.

Shapes are those of :mod:`mindspeed.training.batches`, of this rank's tokens; nothing is read, sent
or compared. What depends on data is assumed:

* Packed documents are all of ``--fix-sub-seq-length``; without it every sample has
  :data:`DOCUMENTS` of equal length.
* Variable lengths are all ``--seq-length``, the longest.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mindspeed import device, session
from mindspeed.attention.packed_batch import CuSeqlens, cu_seqlens_of_length, cu_seqlens_of_samples
from mindspeed.features.dynamic_pipeline import sizes_of_arguments
from mindspeed.features.packed_documents import resets

DOCUMENTS = 4
"""Documents of a sample."""

Batch = dict[str, Any]


def readers_of(args: argparse.Namespace, config: Any) -> list[InventedBatches | None]:
    """One reader for each chunk of this rank; None where a chunk needs no data.

    Args:
        args: final values.
        config: Megatron's configuration of the model.
    """
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank

    from mindspeed.adaptor.pipeline_ends import pipeline_ends

    seams, chunks = session.install().seams, args.virtual_pipeline_model_parallel_size
    everywhere = args.variable_seq_lengths or bool(seams.documents.functions)
    readers: list[InventedBatches | None] = []
    for vp_stage in range(chunks) if chunks else [None]:
        ends = pipeline_ends(seams, vp_stage)
        where: dict[str, Any] = {"ignore_virtual": chunks is None, "vp_stage": vp_stage}
        if args.mtp_num_layers and mtp_on_this_rank(config, **where):
            ends = True, True
        needed = any(ends) or everywhere
        readers.append(InventedBatches(args, *ends) if needed else None)
    return readers


class InventedBatches(Iterator[Batch]):
    """The micro-batches of one chunk, without end.

    Args:
        args: final values.
        pre_process: the chunk embeds tokens.
        post_process: the chunk computes the loss.

    Attributes:
        micro_batch_sizes: samples of the micro-batches of a step, where they differ.
    """

    def __init__(self, args: argparse.Namespace, pre_process: bool, post_process: bool) -> None:
        self._args, self._pre_process, self._post_process = args, pre_process, post_process
        self.micro_batch_sizes = sizes_of_arguments(vars(args))
        self._sizes = itertools.cycle(self.micro_batch_sizes or (args.micro_batch_size,))

    def lengths_ahead(self, count: int) -> list[int]:
        """Lengths of the next ``count`` micro-batches, summed over context-parallel ranks."""
        return [self._args.seq_length] * count

    def __next__(self) -> Batch:
        samples = next(self._sizes)
        positions, packing = self._positions(samples)
        shape, where = (samples, positions.shape[1]), device.current().torch_device()
        batch: Batch = dict.fromkeys(("tokens", "labels", "loss_mask", "attention_mask"))
        batch["position_ids"] = positions if self._pre_process or packing else None
        if self._pre_process:
            batch["tokens"] = torch.zeros(shape, dtype=torch.int64, device=where)
        if self._post_process:
            batch["labels"] = torch.zeros(shape, dtype=torch.int64, device=where)
            batch["loss_mask"] = torch.ones(shape, device=where)
        return batch | packing

    def _positions(self, samples: int) -> tuple[torch.Tensor, Batch]:
        """Positions of this rank's tokens ``[b, s / cp]`` int64, and what says of documents."""
        from mindspeed.adaptor.micro_batch import shard_batch

        args = self._args
        if not session.install().seams.documents.functions:
            length = args.seq_length // args.context_parallel_size
            where = device.current().torch_device()
            return torch.arange(length, device=where).repeat(samples, 1), {}
        part, packed_seq_params = shard_batch(
            {},
            documents_of(args, samples),
            samples,
            reset_mask=args.reset_attention_mask or args.pack_sequences,
            reset_positions=args.reset_position_ids or args.pack_sequences,
        )
        positions = part["position_ids"].clone()  # on the device, where it counts
        assert packed_seq_params.packed is not None
        packed_seq_params.packed = replace(packed_seq_params.packed, positions=positions)
        return positions, {"packed_seq_params": packed_seq_params}


def documents_of(args: argparse.Namespace, samples: int) -> CuSeqlens:
    """The documents that are assumed in the concatenated samples of a micro-batch."""
    size, given = args.seq_length, args.fix_sub_seq_length
    if not resets(vars(args)):
        return cu_seqlens_of_samples(samples, size)
    return cu_seqlens_of_length(samples, size, given if given > 0 else -(-size // DOCUMENTS))
