"""Batches of conversations: samples of different lengths, padded or packed.

    --variable-seq-lengths   a micro-batch is as long as its longest sequence, rounded up
    --pack-sequences         a sequence holds several samples that do not see each other

Positions restart with every packed sample, which tells where samples begin
(:mod:`mindspeed.training.batches`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import torch

from mindspeed.data.packing import rounded_up
from mindspeed.training.token_counts import sample_counts

_WORDS = ("tokens", "labels", "loss_mask", "position_ids")


def length_multiple(args: argparse.Namespace) -> int:
    """Lengths of micro-batches are multiples of this."""
    tensor = args.tensor_model_parallel_size if args.sequence_parallel else 1
    context = 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1
    return math.lcm(args.pad_to_multiple_of, tensor, context)


class Collate:
    """Pads samples to one length; called in the reader processes.

    Args:
        pad: token id of padding.
        seq_length: longest sequence.
        multiple: lengths are rounded up to a multiple of this; None: always ``seq_length``.
        keys: :func:`mindspeed.training.flops.keys_of_a_query`.
    """

    def __init__(
        self, pad: int, seq_length: int, multiple: int | None, keys: Callable[[int], float]
    ) -> None:
        self._pad = pad
        self._seq_length = seq_length
        self._multiple = multiple
        self._keys = keys

    def __call__(self, items: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Pad samples to one length.

        Args:
            items: tensors [s_i] with the dtypes below.

        Returns:
            ``tokens``, ``labels``, ``position_ids`` int64 [b, s], ``loss_mask`` fp32 [b, s];
            positions of padding count from 0, as those of a sample. ``counts`` int64 [2] are
            :func:`mindspeed.training.token_counts.sample_counts`.
        """
        width = self._seq_length
        if self._multiple is not None:
            width = rounded_up(max(len(item["tokens"]) for item in items), self._multiple)
        shape = (len(items), width)
        batch = {
            "tokens": torch.full(shape, self._pad),
            "labels": torch.zeros(shape, dtype=torch.int64),
            "loss_mask": torch.zeros(shape),
            "position_ids": torch.zeros(shape, dtype=torch.int64),
            "counts": sample_counts(items, self._keys),
        }
        for index, item in enumerate(items):
            length = len(item["tokens"])
            for name in _WORDS:
                batch[name][index, :length] = item[name]
            batch["position_ids"][index, length:] = torch.arange(width - length)
        return batch
