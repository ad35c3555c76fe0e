"""Digests of tensors that do not depend on how ranks share them: those of shards add up.

A tensor is seen as ``[rows, columns]``, in :data:`BLOCKS` blocks of rows. Of each block:

    sketch   K numbers: sum of r_k(i) * c_k(j) * x_ij, r and c = +-1 from a hash of the GLOBAL
             indices. Linear, so ``sketch(a) - sketch(b)`` is that of ``a - b``, and its mean square
             estimates ``||a - b||^2``: the distance of two runs without the values
    others   sum, sum of squares, largest magnitude, number of values that are not finite

The exact digest is a sum modulo 2^64 of the values' bits times odd numbers from hashes of the
indices: a single changed bit always changes it. Product sketches need signs of rows and of columns
only, which are computed once for each place and kept.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import torch

SKETCHES = 16
BLOCKS = 8
SUM, SQUARES, LARGEST, NOT_FINITE = range(SKETCHES, SKETCHES + 4)
WIDTH = SKETCHES + 4
_CHUNK = 256  # columns added in fp32; more lose what rounding of fp32 values is compared with
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Place:
    """Which elements of the whole tensor a piece holds: all pairs of its rows and columns.

    Attributes:
        shape: Rows and columns of the whole tensor.
        rows: Global row of each row of the piece, int64 on the host.
        columns: Global column of each column.
    """

    shape: tuple[int, int]
    rows: torch.Tensor
    columns: torch.Tensor

    @functools.cached_property
    def identity(self) -> str:
        """Equal for pieces that hold the same elements: copies."""
        text = hashlib.sha1(repr(self.shape).encode())
        for index in (self.rows, self.columns):
            text.update(index.numpy().tobytes())
        return text.hexdigest()[:16]

    @functools.cached_property
    def count(self) -> int:
        """Number of elements."""
        return len(self.rows) * len(self.columns)

    def on(self, device: torch.device) -> _Signs:
        """The signs of its rows and columns, on a device."""
        found = self._signs.get(device)
        if found is None:
            found = self._signs[device] = self._signs_on(device)
        return found

    @functools.cached_property
    def _signs(self) -> dict[torch.device, _Signs]:
        return {}

    def _signs_on(self, device: torch.device) -> _Signs:
        wide = torch.float32 if device.type == "npu" else torch.float64
        blocks = (self.rows * BLOCKS).div(max(self.shape[0], 1), rounding_mode="floor")
        columns = torch.cat([_signs(self.columns, 2), torch.ones(len(self.columns), 1)], 1)
        rows = torch.cat([_signs(self.rows, 1), torch.ones(len(self.rows), 1)], 1)
        return _Signs(columns.to(device), rows.to(device, wide), blocks.to(device), wide)


@dataclass(frozen=True)
class _Signs:
    columns: torch.Tensor  # [columns, K + 1] fp32; the last column is one, for the sum
    rows: torch.Tensor  # [rows, K + 1]
    blocks: torch.Tensor  # [rows]
    wide: torch.dtype


def whole(rows: int, columns: int = 1) -> Place:
    """The place of a tensor that a rank holds whole."""
    return Place((rows, columns), torch.arange(rows), torch.arange(columns))


def digest(x: torch.Tensor, place: Place) -> torch.Tensor:
    """Digest of a piece.

    Args:
        x: ``[rows, columns]`` of the piece, any dtype.
        place: where they are in the whole tensor.

    Returns:
        ``[BLOCKS, WIDTH]`` fp64 (fp32 where a device has no fp64), on the device of ``x``.
    """
    signs = place.on(x.device)
    found = x.new_zeros((BLOCKS, WIDTH), dtype=signs.wide)
    if x.numel() == 0:
        return found
    x = x.detach()
    if not x.is_floating_point():
        x = x.double()
    products = _products(x, signs) * signs.rows
    found[:, : SKETCHES + 1].index_add_(0, signs.blocks, products)
    norms = torch.linalg.vector_norm(x, dim=1, dtype=_accumulator(x)).to(signs.wide)
    found[:, SQUARES].index_add_(0, signs.blocks, norms.square())
    largest = torch.linalg.vector_norm(x, float("inf"), dim=1).to(signs.wide)
    found[:, LARGEST] = found[:, LARGEST].scatter_reduce(0, signs.blocks, largest, "amax")
    if x.device.type != "cpu" or not torch.isfinite(largest).all():
        bad = (~torch.isfinite(x)).sum(1).to(signs.wide)
        found[:, NOT_FINITE].index_add_(0, signs.blocks, bad)
    return found


def _accumulator(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _products(x: torch.Tensor, signs: _Signs) -> torch.Tensor:
    """``[rows, K + 1]``: each row times the signs of its columns."""
    if x.dtype is torch.float64 or x.numel() <= 1 << 14:
        return x.to(signs.wide) @ signs.columns.to(signs.wide)
    x = x.float()
    parts = [
        part @ own
        for part, own in zip(x.split(_CHUNK, 1), signs.columns.split(_CHUNK), strict=True)
    ]
    total = parts[0].to(signs.wide)
    for part in parts[1:]:
        total += part
    return total


def exact(x: torch.Tensor, place: Place) -> torch.Tensor:
    """Exact digest of a piece: an int64 scalar on its device; -0 counts as +0.

    Args:
        x: ``[rows, columns]`` of the piece, any dtype.
        place: where they are in the whole tensor.
    """
    x = x.detach() + 0 if x.is_floating_point() else x.detach()
    bits = x.contiguous().view(_BITS[x.element_size()]).to(torch.int64)
    rows, columns = (
        (_mixed(index, seed) | 1).to(x.device)
        for index, seed in ((place.rows, 3), (place.columns, 4))
    )
    return (rows * (bits * columns).sum(1)).sum()


def _signs(index: torch.Tensor, seed: int) -> torch.Tensor:
    bits = (_mixed(index, seed)[:, None] >> torch.arange(1, SKETCHES + 1)) & 1
    return (1 - 2 * bits).float()


def _mixed(index: torch.Tensor, seed: int) -> torch.Tensor:
    """64 bits from a hash of each index (splitmix64)."""
    state = index.to(torch.int64) * _MIX[0] + (seed * _MIX[2] + 2**63) % 2**64 - 2**63
    state = (state ^ _shifted(state, 30)) * _MIX[1]
    state = (state ^ _shifted(state, 27)) * _MIX[2]
    return state ^ _shifted(state, 31)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    return (state >> bits) & ((1 << (64 - bits)) - 1)
