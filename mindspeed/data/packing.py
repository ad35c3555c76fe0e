"""Which samples share a row, and what padding costs.

Samples of an instruction data set have very different lengths. A batch can

    pad to the sequence length   A A . . . . . .     most of the work is on padding
    pad to its longest sample    A A . . .           less, in steps of --pad-to-multiple-of
    hold samples of one length   A A A A .           little
    pack several into a row      A A B B B C C .     hardly any

:func:`first_fit_decreasing` packs, :func:`grouped` sorts, :func:`padding` measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 4096  # samples that are packed together; larger windows fill rows hardly any better


def first_fit_decreasing(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Put every sample, longest first, into the first row that still has room for it.

    Args:
        lengths: of the samples, none longer than ``room``.
        room: of a row.

    Returns:
        The samples of each row, as positions in ``lengths``.
    """
    rows: list[list[int]] = []
    free = np.empty(len(lengths), np.int64)
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = lengths[index]
        fitting = free[: len(rows)] >= length
        row = int(fitting.argmax()) if fitting.any() else len(rows)
        if row == len(rows):
            rows.append([])
            free[row] = room
        rows[row].append(index)
        free[row] -= length
    return rows


def packed(
    order: np.ndarray, lengths: np.ndarray, room: int, random: np.random.RandomState | None
) -> list[np.ndarray]:
    """Rows of one epoch: packed window by window, in the order of an epoch.

    Args:
        order: samples in the order of the epoch.
        lengths: of all samples, indexed by sample.
        room: of a row.
        random: shuffles the rows of a window; None: by their first samples.
    """
    rows = []
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        found = first_fit_decreasing(lengths[window], room)
        if random is None:
            rows += [window[row] for row in sorted(sorted(row) for row in found)]
        else:
            rows += [window[found[row]] for row in random.permutation(len(found))]
    return rows


def grouped(
    order: np.ndarray, lengths: np.ndarray, batch: int, random: np.random.RandomState
) -> np.ndarray:
    """One epoch in which ``batch`` samples that follow each other are of similar length.

    Args:
        order: samples in shuffled order.
        lengths: of all samples, indexed by sample.
        batch: samples of one micro-batch on all data-parallel ranks.
        random: shuffles the batches, so that lengths do not rise and fall over an epoch.
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
    """What the rows of some micro-batches cost.

    Attributes:
        tokens: of samples.
        positions: that are computed, padding included.
        pairs: query-key pairs that causal attention computes.
    """

    tokens: int
    positions: int
    pairs: int

    @property
    def fraction(self) -> float:
        """Part of the positions that is padding."""
        return 1 - self.tokens / self.positions

    def flops(self, per_token: float, per_pair: float) -> float:
        """Work, from the work for a position outside of attention and for a pair in it."""
        return per_token * self.positions + per_pair * self.pairs


def padding(
    rows: Iterable[Sequence[int]],
    batch: int,
    multiple: int,
    *,
    fixed: int | None = None,
    packed: bool = False,
) -> Padding:
    """Measure rows that are computed ``batch`` at a time.

    Args:
        rows: lengths of the samples in each row.
        batch: rows of a micro-batch.
        multiple: a micro-batch is as long as its longest row, rounded up to this; or
        fixed: every row has this length.
        packed: samples of a row do not see each other, nor the padding behind them.
    """
    tokens = positions = pairs = 0
    rows = list(rows)
    for start in range(0, len(rows), batch):
        some = rows[start : start + batch]
        width = fixed or rounded_up(max(map(sum, some)), multiple)
        for row in some:
            used = sum(row)
            tokens += used
            positions += width
            parts = [*row, width - used] if packed else [width]
            pairs += sum(part * (part + 1) // 2 for part in parts)
    return Padding(tokens, positions, pairs)


def rounded_up(length: int, multiple: int) -> int:
    """The next multiple."""
    return -(-length // multiple) * multiple
