"""Sequence packing, length grouping, and the cost of padding.

Samples of an instruction data set have very different lengths. A batch can

    pad to the sequence length        A A . . . . . .   most of the work is on padding
    pad to its longest sample         A A . . .         less, in steps of --pad-to-multiple-of
    group samples of similar length   A A A A .         little
    pack several into one sequence    A A B B B C C .   hardly any

:func:`first_fit_decreasing` packs, :func:`grouped` sorts, :func:`padding` measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 4096  # samples that are packed together; larger windows hardly improve the packing


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Put every sample, longest first, into the first bin that has room for it.

    Args:
        lengths: length of each sample, int ``[samples]``, none above ``capacity``.
        capacity: tokens of a packed sequence.

    Returns:
        The samples of each packed sequence, as indices into ``lengths``.
    """
    bins: list[list[int]] = []
    free = np.empty(len(lengths), np.int64)
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = lengths[index]
        fitting = free[: len(bins)] >= length
        target = int(fitting.argmax()) if fitting.any() else len(bins)
        if target == len(bins):
            bins.append([])
            free[target] = capacity
        bins[target].append(index)
        free[target] -= length
    return bins


def packed(
    order: np.ndarray, lengths: np.ndarray, capacity: int, random: np.random.RandomState | None
) -> list[np.ndarray]:
    """Packed sequences of one epoch, each as an array of sample indices.

    Args:
        order: sample indices in the order of the epoch, int ``[samples]``.
        lengths: length of every sample, indexed by sample.
        capacity: tokens of a packed sequence.
        random: shuffles the sequences of a window; None orders them by their first samples.
    """
    sequences = []
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        bins = first_fit_decreasing(lengths[window], capacity)
        if random is None:
            sequences += [window[members] for members in sorted(sorted(bin) for bin in bins)]
        else:
            sequences += [window[bins[index]] for index in random.permutation(len(bins))]
    return sequences


def grouped(
    order: np.ndarray, lengths: np.ndarray, batch: int, random: np.random.RandomState
) -> np.ndarray:
    """One epoch in which ``batch`` consecutive samples have similar length.

    Args:
        order: sample indices in shuffled order, int ``[samples]``.
        lengths: length of every sample, indexed by sample.
        batch: samples of one micro-batch on all data-parallel ranks.
        random: shuffles the batches, so that lengths do not follow a trend over an epoch.

    Returns:
        Reordered sample indices, int ``[samples]``.
    """
    whole = len(order) // batch * batch
    batches = []
    step = max(WINDOW // batch, 1) * batch
    for start in range(0, whole, step):
        window = order[start : min(start + step, whole)]
        window = window[np.argsort(-lengths[window], kind="stable")].reshape(-1, batch)
        batches.append(window[random.permutation(len(window))])
    return np.concatenate([*(part.ravel() for part in batches), order[whole:]])


@dataclass(frozen=True)
class Padding:
    """The cost of some micro-batches.

    Attributes:
        tokens: tokens of samples.
        positions: computed positions, including padding.
        pairs: query-key pairs that causal attention computes.
    """

    tokens: int
    positions: int
    pairs: int

    @property
    def fraction(self) -> float:
        """Fraction of the positions that is padding."""
        return 1 - self.tokens / self.positions

    def flops(self, per_token: float, per_pair: float) -> float:
        """FLOPs, from those of a position outside attention and of a query-key pair."""
        return per_token * self.positions + per_pair * self.pairs


def padding(
    sequences: Iterable[Sequence[int]],
    batch: int,
    multiple: int,
    *,
    fixed: int | None = None,
    packed: bool = False,
) -> Padding:
    """Measure the padding of sequences that are computed ``batch`` at a time.

    Args:
        sequences: lengths of the samples in each sequence.
        batch: sequences of a micro-batch.
        multiple: a micro-batch is as long as its longest sequence, rounded up to this, unless
        fixed: every sequence has this length.
        packed: samples of a sequence attend neither to each other nor to padding.
    """
    tokens = positions = pairs = 0
    sequences = list(sequences)
    for start in range(0, len(sequences), batch):
        micro_batch = sequences[start : start + batch]
        width = fixed or rounded_up(max(map(sum, micro_batch)), multiple)
        for samples in micro_batch:
            used = sum(samples)
            tokens += used
            positions += width
            parts = [*samples, width - used] if packed else [width]
            pairs += sum(part * (part + 1) // 2 for part in parts)
    return Padding(tokens, positions, pairs)


def rounded_up(length: int, multiple: int) -> int:
    """``length`` rounded up to a multiple."""
    return -(-length // multiple) * multiple
