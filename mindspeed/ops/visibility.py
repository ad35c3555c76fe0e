"""The sparse modes of attention as one band predicate, which is cheap to restrict to a tile.

In coordinates of one sequence, query i and key j counted from its start, ``d = keys - queries``:

    mode  hidden when                              aligned at
    0     j > i + next, j < i - pre, or masked     top left
    1     masked                                   -
    2     j > i                                    top left
    3     j > i + d                                bottom right
    4     j > i + d + next or j < i + d - pre      bottom right
    5, 6  j > i + d and j >= prefix                bottom right
    7     mode 3, but the last sequence mode 4     packed sequences, last one truncated
    8     mode 2, but the first sequence mode 4    packed sequences, first one truncated

All are a band ``low <= j - i <= high``, to which a prefix adds columns and from which a mask
removes keys. A band is two numbers, so the keys of a tile of the score matrix, and whether any of
them is masked, are known without a mask of the whole matrix (:class:`Sight`).

Kernels of NPU read masks: a causal one of any length from a triangle of 2048 x 2048, 4 MiB, which
is made once per device (:func:`causal_mask`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch._guards import detect_fake_mode

EVERYTHING = 2147483647
"""``pre`` and ``next`` that reach every key."""

UNCUT, MASK_ONLY, TOP_LEFT_CAUSAL, CAUSAL, BAND, PREFIX_FULL, PREFIX = range(7)
CUT_BEHIND, CUT_IN_FRONT = 7, 8
MODES = range(9)


@dataclass(frozen=True)
class Sight:
    """The keys that the queries of one sequence see.

    Attributes:
        low: key j is seen by query i only if ``j - i >= low``.
        high: ... and ``j - i <= high``.
        prefix: ``[b]`` keys that every query sees beyond the band, or None.
        mask: broadcastable to ``[b, n, queries, keys]``, True is masked, or None.
    """

    queries: int
    keys: int
    low: int
    high: int
    prefix: tuple[int, ...] | None = None
    mask: Tensor | None = None

    @property
    def is_full(self) -> bool:
        """Every query sees every key."""
        return self._inside(0, self.queries, 0, self.keys) and self.mask is None

    @property
    def is_triangle(self) -> bool:
        """Query i sees exactly the keys up to i."""
        plain = self.prefix is None and self.mask is None
        return plain and self.high == 0 and self.low <= -(self.queries - 1)

    @property
    def is_trapezoid(self) -> bool:
        """Keys that every query sees come before those of a triangle."""
        plain = self.prefix is None and self.mask is None
        below = 0 < self.high <= self.keys - self.queries
        return plain and below and self.low <= -(self.queries - 1)

    def reach(self, first: int, last: int) -> tuple[int, int]:
        """The range of keys outside of which queries ``[first, last)`` see nothing."""
        start = min(max(first + self.low, 0), self.keys)
        stop = min(max(last + self.high, 0), self.keys)
        if self.prefix is not None:
            start, stop = 0, max(stop, min(max(self.prefix), self.keys))
        return start, max(start, stop)

    def hidden(self, rows: slice, columns: slice, device: torch.device) -> Tensor | None:
        """True where query and key of a tile do not meet; None where all do.

        bool, broadcastable to ``[b, n, rows, columns]``.
        """
        tile = (rows.start, rows.stop, columns.start, columns.stop)
        given = None if self.mask is None else tile_of(self.mask, rows, columns)
        if self._inside(*tile):
            return given
        key = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=device)
        query = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=device)[:, None]
        distance = key - query
        # A limit that reaches everything may lie beyond 32 bits by the length of the sequence.
        hidden = distance > min(self.high, EVERYTHING)
        if self.low > columns.start - rows.stop:
            hidden |= distance < self.low
        if self.prefix is not None:
            prefix = torch.tensor(self.prefix, device=device).view(-1, 1, 1, 1)
            hidden = hidden & (key >= prefix)
        return hidden if given is None else hidden | given

    def blind(self, device: torch.device) -> Tensor | None:
        """bool, broadcastable to ``[b, n, queries]``: True where a query sees no key, or None."""
        everything = slice(0, self.queries), slice(0, self.keys)
        if self.mask is not None:
            hidden = self.hidden(*everything, device)
            assert hidden is not None
            return hidden.expand(*hidden.shape[:-2], self.queries, self.keys).all(-1)
        # Query i sees keys from i + low to i + high, as far as there are any.
        first, last = max(0, -self.high), min(self.queries, self.keys - self.low)
        first = self.queries if self.low > self.high else first
        prefix = (0,) if self.prefix is None else self.prefix
        if (first <= 0 and last >= self.queries) or min(prefix) > 0:
            return None
        query = torch.arange(self.queries, device=device)
        beyond = (query < first) | (query >= last)
        return torch.tensor(prefix, device=device).view(-1, 1, 1).le(0) & beyond

    def pairs(self) -> int:
        """Number of (query, key) pairs inside band and prefix, per sequence and head."""
        # Of NumPy: the count of FLOPs needs numbers, also where torch only traces shapes.
        first = np.arange(self.queries, dtype=np.int64)
        start = (first + self.low).clip(0, self.keys)
        stop = (first + self.high + 1).clip(0, self.keys)
        if self.prefix is None:
            return int((stop - start).clip(min=0).sum())
        prefix = np.array(self.prefix).clip(max=self.keys)[:, None]
        return int(np.maximum(stop, prefix).sum()) // len(self.prefix)

    def _inside(self, row: int, row_stop: int, key: int, key_stop: int) -> bool:
        """Whether the band hides nothing of a tile."""
        band = key_stop - 1 - row <= self.high and key - (row_stop - 1) >= self.low
        return band or (self.prefix is not None and key_stop <= min(self.prefix))


def sight(
    queries: int,
    keys: int,
    mode: int,
    pre: int = EVERYTHING,
    next: int = EVERYTHING,
    *,
    prefix: Sequence[int] | None = None,
    mask: Tensor | None = None,
    sequence: int = 0,
    sequences: int = 1,
) -> Sight:
    """The sight of one sequence under a sparse mode.

    Args:
        mode: 0 to 8, see the table above.
        pre: how many keys before its own a query sees (modes 0, 4, 7, 8).
        next: how many keys after its own (same modes); negative hides more keys.
        prefix: per batch entry, for modes 5 and 6.
        mask: bool, broadcastable to ``[b, n, queries, keys]``, True is masked; modes 0 and 1.
        sequence: number of the sequence in its pack.
        sequences: how many the pack has.
    """
    d = keys - queries
    special = (mode == CUT_BEHIND and sequence == sequences - 1) or (
        mode == CUT_IN_FRONT and sequence == 0
    )
    if mode == UNCUT:
        return Sight(queries, keys, -pre, next, mask=mask)
    if mode == MASK_ONLY:
        return Sight(queries, keys, -EVERYTHING, EVERYTHING, mask=mask)
    if mode == BAND or special:
        return Sight(queries, keys, d - pre, d + next)
    if mode in (TOP_LEFT_CAUSAL, CUT_IN_FRONT):
        return Sight(queries, keys, -EVERYTHING, 0)
    columns = None if prefix is None or mode not in (PREFIX_FULL, PREFIX) else tuple(prefix)
    return Sight(queries, keys, -EVERYTHING, d, prefix=columns)


def tile_of(x: Tensor, rows: slice, columns: slice) -> Tensor:
    """The tile ``[..., rows, columns]`` of ``x``, any dtype.

    ``x`` is broadcastable to ``[..., queries, keys]``.
    """
    if x.dim() > 1 and x.shape[-2] > 1:
        x = x[..., rows, :]
    return x if x.shape[-1] == 1 else x[..., columns]


COMPRESSED = 2048
"""Rows and columns of the compressed causal mask."""

_cache: dict[tuple[str, int, torch.device], Tensor] = {}


def causal_mask(device: torch.device | str, size: int = COMPRESSED) -> Tensor:
    """bool ``[size, size]``, True above the diagonal; one per size and device."""
    return _cached("causal", size, device, lambda: _ones(size, size, device).triu(1))


def prefix_mask(device: torch.device | str) -> Tensor:
    """bool ``[3072, 2048]``: the triangle, below it a left half of False, a right one of True."""

    def make() -> Tensor:
        rectangle = _ones(COMPRESSED // 2, COMPRESSED, device)
        rectangle[:, : COMPRESSED // 2] = False
        return torch.cat([_ones(COMPRESSED, COMPRESSED, device).triu(1), rectangle])

    return _cached("prefix", COMPRESSED, device, make)


def generate_attention_mask(
    compress: bool, device: torch.device | str, seq_length: int = COMPRESSED
) -> Tensor:
    """Return the causal mask, True is masked.

    Args:
        compress: bool ``[2048, 2048]`` for any sequence length; else ``[seq_length, seq_length]``.
        seq_length: Size of the mask that is not compressed.
    """
    return causal_mask(device, COMPRESSED if compress else seq_length)


def _ones(rows: int, columns: int, device: torch.device | str) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=device)


def _cached(kind: str, size: int, device: torch.device | str, make: Callable[[], Tensor]) -> Tensor:
    if detect_fake_mode() is not None:  # a fake tensor must not outlive its mode
        return make()
    key = (kind, size, torch.device(device))
    if key not in _cache:
        _cache[key] = make()
    return _cache[key]
