"""Micro-batches of conversations: samples of different lengths, padded or packed.

    --variable-seq-lengths   a micro-batch is as long as its longest row, rounded up
    --pack-sequences         a row holds several samples that do not see each other

The leader of a tensor-parallel group reads and hands on, in one broadcast, after one of 8 bytes
with the length where it varies:

    first stage   tokens, positions           b * s * 16 bytes
    last stage    labels, loss mask           b * s * 16 bytes
    all stages    positions, when packed      b * s * 8 bytes

Positions start again with every packed sample, so each rank reads the samples' borders from them
and tells its attention, on inner pipeline stages, too: as ``PackedSeqParams`` (layout thd, where
the rows of a micro-batch are one) or, for the local attention, as a block-diagonal mask.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank

from mindspeed import device
from mindspeed.data.packing import rounded_up

_WORDS = ("tokens", "labels", "loss_mask", "position_ids")


def row_multiple(args: argparse.Namespace) -> int:
    """Lengths of micro-batches are multiples of this."""
    tensor = args.tensor_model_parallel_size if args.sequence_parallel else 1
    context = 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1
    return math.lcm(args.pad_to_multiple_of, tensor, context)


def flattened(args: argparse.Namespace) -> bool:
    """The rows of a micro-batch are one row of layout thd."""
    return args.pack_sequences and args.transformer_impl != "local"


def stage_shape(args: argparse.Namespace) -> tuple[int, int]:
    """Sequence length and batch size of what pipeline stages exchange."""
    if flattened(args):
        return args.micro_batch_size * args.seq_length, 1
    return args.seq_length, args.micro_batch_size


class Collate:
    """Pads samples to one length; called in the reader processes.

    Args:
        pad: id that fills rows.
        seq_length: the longest row.
        multiple: of the length, or None for ``seq_length`` always.
    """

    def __init__(self, pad: int, seq_length: int, multiple: int | None) -> None:
        self._pad = pad
        self._seq_length = seq_length
        self._multiple = multiple

    def __call__(self, items: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """``[b, s]`` tensors; positions of padding count from 0, as those of a sample."""
        width = self._seq_length
        if self._multiple is not None:
            width = rounded_up(max(len(item["tokens"]) for item in items), self._multiple)
        shape = (len(items), width)
        batch = {
            "tokens": torch.full(shape, self._pad),
            "labels": torch.zeros(shape, dtype=torch.int64),
            "loss_mask": torch.zeros(shape),
            "position_ids": torch.zeros(shape, dtype=torch.int64),
        }
        for row, item in enumerate(items):
            length = len(item["tokens"])
            for name in _WORDS:
                batch[name][row, :length] = item[name]
            batch["position_ids"][row, length:] = torch.arange(width - length)
        return batch


class InstructionBatches(Iterator[dict[str, Any]]):
    """The micro-batches of one pipeline stage on this rank.

    Args:
        args: final values.
        loader: yields what :class:`Collate` makes on the leader of the tensor-parallel group.
        first: the stage embeds tokens.
        last: the stage computes the loss.
    """

    def __init__(
        self, args: argparse.Namespace, loader: Iterator[Any] | None, *, first: bool, last: bool
    ) -> None:
        self._loader = loader
        self._rows = args.micro_batch_size
        self._width = None if args.variable_seq_lengths else args.seq_length
        self._packed = args.pack_sequences
        self._flat = flattened(args)
        self._words = [
            *(["tokens"] if first else []),
            *(["labels", "loss_mask"] if last else []),
            *(["position_ids"] if first or self._packed else []),
        ]
        self._device = device.current().torch_device()
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._leader = parallel_state.get_tensor_model_parallel_src_rank()

    def __next__(self) -> dict[str, Any]:
        sample = next(self._loader) if self._loader is not None else None
        width = self._shared_width(sample)
        words = None if sample is None else torch.stack([_bits(sample[w]) for w in self._words])
        received = self._broadcast(words, (len(self._words), self._rows, width))
        batch: dict[str, Any] = dict.fromkeys((*_WORDS, "attention_mask"))
        batch.update(zip(self._words, received.unbind(), strict=True))
        if batch["loss_mask"] is not None:
            batch["loss_mask"] = batch["loss_mask"].to(torch.int32).view(torch.float32)
        if not self._packed:
            return get_batch_on_this_cp_rank(batch)
        if not self._flat:
            batch["attention_mask"] = _block_diagonal(batch["position_ids"])
            return batch
        packed_seq_params = _borders(batch["position_ids"])
        batch = {key: None if x is None else x.reshape(1, -1) for key, x in batch.items()}
        return {**batch, "packed_seq_params": packed_seq_params}

    def _shared_width(self, sample: Any) -> int:
        if self._width is not None:
            return self._width
        width = 0 if sample is None else sample["tokens"].shape[1]
        if self._group.size() == 1:
            return width
        return int(self._broadcast(None if sample is None else torch.tensor([width]), (1,)))

    def _broadcast(self, tensor: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
        if tensor is None:
            tensor = torch.empty(tuple(shape), dtype=torch.int64, device=self._device)
        else:
            tensor = tensor.to(self._device, non_blocking=True)
        if self._group.size() > 1:
            dist.broadcast(tensor, self._leader, group=self._group)
        return tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As 8-byte words; fp32 keeps its bits."""
    return (tensor.view(torch.int32) if tensor.is_floating_point() else tensor).to(torch.int64)


def _borders(position_ids: torch.Tensor) -> PackedSeqParams:
    """Where each sample of the flattened rows begins: where positions start again."""
    starts = torch.nonzero(position_ids.reshape(-1) == 0).flatten()
    end = starts.new_tensor([position_ids.numel()])
    cu_seqlens = torch.cat([starts, end]).to(torch.int32)
    longest = int(cu_seqlens.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _block_diagonal(position_ids: torch.Tensor) -> torch.Tensor:
    """``[b, 1, s, s]``, True where a query must not look: later tokens and other samples."""
    samples = (position_ids == 0).cumsum(dim=1)
    other = samples[:, :, None] != samples[:, None, :]
    size = position_ids.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=position_ids.device).triu(1)
    return (other | later)[:, None]
