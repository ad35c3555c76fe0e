"""Model FLOPs of a step, and counts of trained tokens where sequences have padding or differ.

    positions   what is computed: sequences x their length, padding included
    tokens      of samples, without padding
    pairs       of queries and keys in causal attention, mean over layers: half the squared length
                of every sample, less in a sliding window

Only tensor-parallel rank 0 reads sequences, so each such rank counts its own, and all ranks sum
their counts once per log interval (24 bytes).

FLOPs of a training step follow from them by :mod:`mindspeed.profiling.model_flops`. These are model
FLOPs, the numerator of MFU, without recomputation; executed FLOPs are counted by
``--op-cal-tflops``.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device, session
from mindspeed.profiling.model_flops import (
    Computing,
    ModelShape,
    causal_keys,
    flops_of_tokens,
    window_of,
    window_pattern,
)


@dataclass(frozen=True)
class TokenCounts:
    """Sums over all ranks of the quantities above."""

    positions: int
    tokens: int
    pairs: float


class FixedLengthCounter:
    """Plain text: all sequences have ``--seq-length`` tokens and no padding."""

    def __init__(self, args: argparse.Namespace) -> None:
        shape = model_shape(args)
        self._length, self._keys = shape.seq_length, shape.keys

    def watch(self, loader: Iterator[Any]) -> Iterator[Any]:
        """Return the loader unchanged."""
        return loader

    def count(self) -> None:
        """No-op: :meth:`take` computes the counts from the sequence length."""

    def take(self, samples: int) -> TokenCounts:
        """Counts of ``samples`` sequences."""
        tokens = samples * self._length
        return TokenCounts(tokens, tokens, tokens * self._keys)


class SampleCounter:
    """Conversations, counted when they are trained; they may be read much earlier."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.int64)
        self._read: deque[torch.Tensor] = deque()

    def watch(self, loader: Iterator[Any]) -> Iterator[Any]:
        """Yield the same batches and remember their counts, in order."""
        for batch in loader:
            positions = torch.tensor([batch["tokens"].numel()])
            self._read.append(torch.cat([positions, batch["counts"]]))
            yield batch

    def count(self) -> None:
        """Count the oldest batch that was read and not counted: it is trained now."""
        self._sums += self._read.popleft()

    def take(self, samples: int) -> TokenCounts:
        """Counts since the last call, over all ranks. Collective; ``samples`` is not used."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        sums = sums.to(device.current().torch_device())
        dist.all_reduce(sums)
        positions, tokens, halves = sums.tolist()
        return TokenCounts(positions, tokens, halves / 2)


TokenCounter = FixedLengthCounter | SampleCounter


def sample_counts(
    items: Sequence[Mapping[str, torch.Tensor]], keys: Callable[[int], float]
) -> torch.Tensor:
    """Number of tokens of all samples, and twice the pairs of their queries and keys.

    Args:
        items: of :class:`mindspeed.data.instruction_dataset.InstructionDataset`:
            ``tokens`` int64 [s], and
            ``cu_seqlens`` int32 [samples + 1] where a sequence packs several samples.
        keys: length of a sample -> keys that its queries see on average.

    Returns:
        [2], int64.
    """
    lengths = [
        item["cu_seqlens"].diff().long() if "cu_seqlens" in item else item["tokens"].new_tensor([n])
        for item in items
        for n in [len(item["tokens"])]
    ]
    every = torch.cat(lengths).tolist()
    return torch.tensor([sum(every), sum(round(2 * n * keys(n)) for n in every)])


def training_flops(args: argparse.Namespace, samples: int) -> float:
    """Floating-point operations to train on ``samples`` sequences of full length."""
    shape = model_shape(args)
    tokens = shape.seq_length * samples
    return flops_of_tokens(shape, tokens, tokens * shape.keys)


def model_shape(args: argparse.Namespace) -> ModelShape:
    """The sizes of a model from its final values."""
    shape = ModelShape.from_megatron(vars(args), _computing())
    assert shape is not None  # final values have no model but GPT
    return shape


def keys_of_a_query(args: argparse.Namespace) -> Callable[[int], float]:
    """Length of a sequence -> keys that a query sees, mean over its queries and the layers."""
    values = vars(args)
    return partial(causal_keys, window_of(values), window_pattern(values, _computing()))


def _computing() -> Computing:
    """Features may have layers that do not compute."""
    active = session.current()
    return list if active is None else active.seams.computing_layers.pipe
