"""Rows of a tensor that are picked out together, known as data before there is a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch


class Index:
    """Rows in an order, each at most once where something is added or put.

    Rows that lie together are one slice, of which ``take`` is a view; others are picked by an index
    tensor, which goes to a device once.
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
    def together(self) -> slice | None:
        """The rows as one slice, or None."""
        if not self.slices:
            return slice(0, 0)
        return self.slices[0] if len(self.slices) == 1 else None

    def meets(self, other: Index) -> bool:
        """Do they share a row?"""
        starts = sorted((part.start, part.stop) for part in (*self.slices, *other.slices))
        return any(a[1] > b[0] for a, b in itertools.pairwise(starts))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows; a view where they lie together."""
        where = self.together
        return x.index_select(0, self.tensor(x.device)) if where is None else x[where]

    def add(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """Add to the rows, in place."""
        if (where := self.together) is None:
            x.index_add_(0, self.tensor(x.device), part.to(x.dtype))
        else:
            x[where] += part

    def put(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """Overwrite the rows, in place."""
        if (where := self.together) is None:
            x.index_copy_(0, self.tensor(x.device), part)
        else:
            x[where].copy_(part)

    def tensor(self, device: torch.device) -> torch.Tensor:
        """The rows as int64 on a device."""
        if device not in self._on:
            parts = [torch.arange(part.start, part.stop) for part in self.slices]
            self._on[device] = torch.cat(parts).to(device, non_blocking=True)
        return self._on[device]
