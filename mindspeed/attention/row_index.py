"""Indices of rows of a ``[rows, ...]`` tensor, built from a plan before the tensor exists.

Adjacent rows become one slice, which selects a view; other rows become an index tensor, which is
copied to each device once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from mindspeed.device.host_tensors import with_values


class RowIndex:
    """Rows of a tensor, in the order in which they are selected.

    No row may occur twice where rows are written (:meth:`add_to`, :meth:`copy_to`).

    Attributes:
        slices: The rows as slices; adjacent ones are joined.
        rows: Number of rows.
    """

    def __init__(self, slices: Iterable[slice]) -> None:
        self.slices: list[slice] = []
        for part in slices:
            if self.slices and self.slices[-1].stop == part.start:
                self.slices[-1] = slice(self.slices[-1].start, part.stop)
            elif part.stop > part.start:
                self.slices.append(part)
        self.rows = sum(part.stop - part.start for part in self.slices)
        self._on: dict[torch.device, torch.Tensor] = {}

    @property
    def as_slice(self) -> slice | None:
        """The rows as one slice; None if they are not contiguous."""
        if not self.slices:
            return slice(0, 0)
        return self.slices[0] if len(self.slices) == 1 else None

    def overlaps(self, other: RowIndex) -> bool:
        """Whether both contain the same row."""
        starts = sorted((part.start, part.stop) for part in (*self.slices, *other.slices))
        return any(a[1] > b[0] for a, b in itertools.pairwise(starts))

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """``[self.rows, ...]`` from ``[rows, ...]``, any dtype; a view if contiguous."""
        where = self.as_slice
        return x.index_select(0, self.tensor(x.device)) if where is None else x[where]

    def add_to(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """Add ``part`` ``[self.rows, ...]`` to these rows of ``x``, in place and in x's dtype."""
        if (where := self.as_slice) is None:
            x.index_add_(0, self.tensor(x.device), part.to(x.dtype))
        else:
            x[where] += part

    def copy_to(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """Overwrite these rows of ``x`` in place; ``part [self.rows, ...]`` has its dtype."""
        if (where := self.as_slice) is None:
            x.index_copy_(0, self.tensor(x.device), part)
        else:
            x[where].copy_(part)

    @with_values
    def tensor(self, device: torch.device) -> torch.Tensor:
        """The row numbers, ``[self.rows]`` int64 on ``device``."""
        if device not in self._on:
            parts = [torch.arange(part.start, part.stop) for part in self.slices]
            self._on[device] = torch.cat(parts).to(device, non_blocking=True)
        return self._on[device]
