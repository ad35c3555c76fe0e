"""Micro-batches of one pipeline stage: read, handed on in the tensor-parallel group, cut.

The leader of a tensor-parallel group reads and hands on in ONE broadcast of 8-byte words
(Megatron-LM sends each tensor apart, and an s x s mask), after one of 16 bytes with the shape where
lengths vary:

    first stage   tokens                            b * s * 8 bytes
    last stage    labels, loss mask                 b * s * 16 bytes
    all stages    where documents begin, if packed  b * s * 8 bytes

Positions are counted on the rank itself and the mask belongs to the attention. Rows of packed
documents stay rows: ``packed_seq_params`` tells every layer where documents begin, and which tokens
the ranks of a context-parallel group have (:mod:`mindspeed.attention.packed`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

from mindspeed import device
from mindspeed.adaptor import session
from mindspeed.adaptor.documents import cut_batch
from mindspeed.adaptor.rows import broadcast_rows
from mindspeed.attention.packed import Borders, borders_of_samples, borders_of_starts, starts_of

Batch = dict[str, Any]  # tensors; None for what a stage does not need


class MicroBatches(Iterator[Batch]):
    """The micro-batches of one pipeline stage on this rank, without end for a cyclic reader.

    Args:
        args: final values.
        loader: yields collated samples on the leader of the tensor-parallel group, else None.
        tokenizer: knows which token ends a document.
        first: the stage embeds tokens.
        last: the stage computes the loss.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        loader: Iterator[Any] | None,
        tokenizer: Any,
        *,
        first: bool,
        last: bool,
    ) -> None:
        self._args = args
        self._loader = loader
        self._tokenizer = tokenizer
        self._shape = None
        if not args.variable_seq_lengths:
            self._shape = (args.micro_batch_size, args.seq_length)
        self._packed = bool(session.install().seams.documents.functions)
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._first = first
        self._names = [*(["tokens"] if first else []), *(["labels", "loss_mask"] if last else [])]
        if self._packed and self._group.size() > 1:
            self._names.append("starts")
        self._device = device.current().torch_device()

    def __next__(self) -> Batch:
        sample = next(self._loader) if self._loader is not None else None
        documents = None
        if self._packed and sample is not None:
            documents = self._documents(sample)
            if self._group.size() > 1:
                sample["starts"] = starts_of(documents, self._args.micro_batch_size)
        received = broadcast_rows(sample, self._names, self._shape, self._group, self._device)
        batch: Batch = {name: received.get(name) for name in ("tokens", "labels", "loss_mask")}
        batch |= {"attention_mask": None, "position_ids": None}
        if not self._packed:
            if self._first:
                rows, width = batch["tokens"].shape
                batch["position_ids"] = torch.arange(width, device=self._device).repeat(rows, 1)
            return get_batch_on_this_cp_rank(batch)  # type: ignore[no-any-return]
        if documents is None:
            documents = borders_of_starts(received["starts"].cpu())
        args = self._args
        batch, packed_seq_params = cut_batch(
            batch,
            documents,
            args.micro_batch_size,
            reset_mask=args.reset_attention_mask or args.pack_sequences,
            reset_positions=args.reset_position_ids or args.pack_sequences,
        )
        return {**batch, "packed_seq_params": packed_seq_params}

    def _documents(self, sample: Any) -> Borders:
        """Borders of what the leader read; conversations and padding count their own positions."""
        if self._args.is_instruction_dataset:
            return borders_of_starts(sample["position_ids"] == 0)
        tokens = sample["tokens"]
        alone = borders_of_samples(*tokens.shape)
        return session.install().seams.documents.pipe(alone, tokens, self._tokenizer)  # type: ignore[no-any-return]
