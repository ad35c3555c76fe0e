"""Which experts' matrices one launch can read: those that lie side by side in memory.

    registered   weight0 weight1 weight2 weight3
    in memory    weight3 weight2 weight1 | gap | weight0        Megatron's gradient buffers
    runs         [0]  [1 2 3, backwards]

Megatron's buffers (gradients always, parameters with the distributed optimizer) hold parameters in
reverse order, in buckets with gaps between them. A launch reads forwards only, so the rows of a
backwards run are copied in the order of memory, and its result back.

The buffers stay as they are: checkpoints of the distributed optimizer hold them as they lie
(``dp_reshardable``, Megatron's default), so another order would read others' states as its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

COPIED = 4
"""Rows are copied where that moves at most a fourth of the bytes of the matrices."""


@dataclass(frozen=True)
class Run:
    """Experts ``first`` to ``first + count - 1``.

    Attributes:
        first: index of the first.
        count: how many.
        matrices: ``[count, ...]``, a view in the order of memory; None: one launch for each.
        backwards: that order is the reverse of the experts'.
    """

    first: int
    count: int
    matrices: torch.Tensor | None = None
    backwards: bool = False

    @property
    def experts(self) -> slice:
        """Of a sequence by expert."""
        return slice(self.first, self.first + self.count)

    def ordered(self, rows: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
        """The run's ``rows [m, ...]`` of ``splits`` in the order of memory."""
        return torch.cat(rows.split(list(splits))[::-1]) if self.backwards else rows

    def restored(self, rows: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
        """The inverse of :meth:`ordered`: ``rows [m, ...]`` by expert, as ``splits``."""
        return torch.cat(rows.split(list(splits)[::-1])[::-1]) if self.backwards else rows

    def sizes(self, splits: Sequence[int]) -> list[int]:
        """``splits`` by expert in the order of memory."""
        return list(splits)[::-1] if self.backwards else list(splits)


def runs(tensors: Sequence[torch.Tensor], splits: Sequence[int], columns: int) -> list[Run]:
    """Divide experts so that few launches serve all.

    Args:
        tensors: One matrix ``[m, n]`` per expert, all of one dtype.
        splits: Rows of each expert.
        columns: Elements of a row that a backwards run copies, input and output together.
    """
    found: list[Run] = []
    for first, count, step in _lines(tensors):
        run = Run(first, count)
        if count > 1:
            rows = sum(splits[first : first + count])
            matrices = sum(tensors[i].numel() for i in range(first, first + count))
            # Copying reads and writes.
            if step > 0 or 2 * rows * columns * COPIED <= matrices:
                start = tensors[first if step > 0 else first + count - 1]
                stacked = start.as_strided((count, *start.shape), (abs(step), *start.stride()))
                run = Run(first, count, stacked, step < 0)
        if found and run.matrices is None and found[-1].matrices is None:
            run = Run(found[-1].first, found[-1].count + count)
            found.pop()
        found.append(run)
    return found


def _lines(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int, int]]:
    """Maximal lines of matrices without gaps: first, count and the step between them."""
    first = 0
    while first < len(tensors):
        count, step = 1, 0
        for i in range(first + 1, len(tensors)):
            found = _step(tensors[i - 1], tensors[i])
            if not found or (step and found != step):
                break
            count, step = count + 1, found
        yield first, count, step
        first += count


def _step(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements from ``a`` to ``b`` if these lie side by side, both contiguous; else 0."""
    if (
        a.shape != b.shape
        or a.dtype != b.dtype
        or a.untyped_storage()._cdata != b.untyped_storage()._cdata
        or not (a.is_contiguous() and b.is_contiguous())
    ):
        return 0
    step = int(b.storage_offset() - a.storage_offset())
    return step if abs(step) == a.numel() else 0
