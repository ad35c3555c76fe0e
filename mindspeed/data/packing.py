"""Sequence packing and length grouping.

Samples of an instruction data set have very different lengths. A batch can

    pad to the sequence length        A A . . . . . .   most of the work is on padding
    pad to its longest sample         A A . . .         less, in steps of --pad-to-multiple-of
    group samples of similar length   A A A A .         little
    pack several into one sequence    A A B B B C C .   hardly any

:func:`first_fit_decreasing` packs, :func:`grouped` sorts.
"""

from __future__ import annotations

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


def count(lengths: np.ndarray, capacity: int) -> int:
    """Number of packed sequences of one epoch of samples ``[samples]``; longer ones are cut."""
    clipped = np.minimum(lengths, capacity)
    return len(packed(np.arange(len(clipped)), clipped, capacity, None))


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


def rounded_up(length: int, multiple: int) -> int:
    """``length`` rounded up to a multiple."""
    return -(-length // multiple) * multiple
