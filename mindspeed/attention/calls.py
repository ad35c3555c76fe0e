"""Few operator calls for many parts of a mask.

The parts of a stage become the sequences of packs: queries, and one or more ranges of keys, with a
band counted from the last query and the last key. In a pack every sequence has the same band, and
no row of queries or keys occurs twice, so that its results and gradients can be put in place at
once. Hundreds of documents are then two calls: whole rectangles, and causal ones.

    causal part, keys end early    =  causal part that ends at its last key  +  whole rectangle
    whole parts of equal queries   =  one whole rectangle with all their keys
    whole parts and a causal one   =  one causal part, whose keys they stand before
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mindspeed.attention.layout import Ranges, length
from mindspeed.attention.mask import INF, Region

LARGEST_PACK = 1000
"""Sequences of a call; npu_fusion_attention takes no more than 1024."""


class Piece(NamedTuple):
    """A sequence of a pack.

    Attributes:
        q0: First query.
        q1: Behind the last query.
        keys: Positions, one range behind the other.
        pre: How far the last query sees to the left of the last key; INF for everything.
        next: How far it would see to the right.
    """

    q0: int
    q1: int
    keys: Ranges
    pre: int
    next: int

    @property
    def band(self) -> tuple[int, int]:
        """``(pre, next)``."""
        return self.pre, self.next


WHOLE, CAUSAL = (INF, INF), (INF, 0)


@dataclass(frozen=True)
class Pack:
    """The sequences of one operator call, with one band.

    Attributes:
        pieces: Ascending queries, ascending keys.
        shift: Of every piece, position of its first query minus that of its first key; None where
            it differs, which is never so if positions matter.
    """

    pieces: tuple[Piece, ...]
    shift: int | None

    @property
    def band(self) -> tuple[int, int]:
        """``(pre, next)``."""
        return self.pieces[0].band

    @functools.cached_property
    def probabilities(self) -> int:
        """Pairs of queries and keys of all pieces, hidden ones included."""
        return sum((piece.q1 - piece.q0) * length(piece.keys) for piece in self.pieces)

    @functools.cached_property
    def cu_seqlens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Running sums of the lengths of queries and of keys, on the host."""
        queries = [0, *itertools.accumulate(piece.q1 - piece.q0 for piece in self.pieces)]
        keys = [0, *itertools.accumulate(length(piece.keys) for piece in self.pieces)]
        return torch.tensor(queries), torch.tensor(keys)


def packs(regions: Sequence[Region], *, positions: bool = False) -> list[Pack]:
    """Group parts of a mask into operator calls.

    Args:
        regions: Their queries lie in one tensor, their keys in one tensor.
        positions: The calls need to know how far apart queries and keys are (ALiBi).
    """
    pieces = [piece for region in regions for piece in _pieces(region)]
    if not positions:
        pieces = list(_joined(pieces))
    found: dict[object, list[list[Piece]]] = {}
    for piece in sorted(pieces):
        alike = found.setdefault((piece.band, _shift(piece) if positions else None), [])
        for pack in alike:
            last = pack[-1]
            if (
                last.q1 <= piece.q0
                and last.keys[-1][1] <= piece.keys[0][0]
                and len(pack) < LARGEST_PACK
            ):
                pack.append(piece)
                break
        else:
            alike.append([piece])
    return [_pack(pack) for alike in found.values() for pack in alike]


def _pack(pieces: Sequence[Piece]) -> Pack:
    shifts = {_shift(piece) for piece in pieces}
    return Pack(tuple(pieces), shifts.pop() if len(shifts) == 1 else None)


def _shift(piece: Piece) -> int:
    return piece.q0 - piece.keys[0][0]


def _pieces(region: Region) -> Iterator[Piece]:
    q0, q1, k0, k1, lo, hi = region
    pre = INF if lo == -INF else k1 - q1 - lo
    after = INF if hi == INF else hi - (k1 - q1)
    if pre == INF and 0 < after < INF:
        # Query k1 - 1 - hi is the first to see all keys.
        yield Piece(q0, k1 - hi, ((k0, k1),), *CAUSAL)
        yield Piece(k1 - hi, q1, ((k0, k1),), *WHOLE)
    else:
        yield Piece(q0, q1, ((k0, k1),), pre, after)


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Whole rectangles of the same queries as one, before the causal piece of these queries."""
    whole: dict[tuple[int, int], list[Piece]] = {}
    causal: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        if piece.band == WHOLE:
            whole.setdefault(piece[:2], []).append(piece)
        elif piece.band == CAUSAL:
            causal.setdefault(piece[:2], []).append(piece)
        else:
            yield piece
    for queries, alike in whole.items():
        keys = tuple(sorted(part for piece in alike for part in piece.keys))
        last = causal.get(queries, [])
        if len(last) == 1 and keys[-1][1] <= last[0].keys[0][0]:
            yield Piece(*queries, (*keys, *causal.pop(queries)[0].keys), *CAUSAL)
        else:
            yield Piece(*queries, keys, *WHOLE)
    for alike in causal.values():
        yield from alike
