"""Batch mask regions into as few calls of the varlen attention operator as possible.

Each region becomes a sequence of a call: a range of queries and one or more ranges of keys, with a
band counted from the last query and the last key. The sequences of a batch have the same band, and
no query and no key occurs in two of them, so outputs and gradients are written with one indexed
copy. Hundreds of documents need two calls: full rectangles, and causal ones. Three rewrites help:

    causal, keys end early        =  causal up to the last key  +  full rectangle
    full, several, equal queries  =  one full rectangle with all their keys
    full + causal, equal queries  =  one causal rectangle whose keys begin with those of the full
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mindspeed.attention.mask import INF, Region
from mindspeed.attention.sequence_sharding import Ranges, length
from mindspeed.device.host_tensors import with_values

MAX_SEQUENCES = 1000
"""Sequences of one call; npu_fusion_attention accepts at most 1024."""


class VarlenSequence(NamedTuple):
    """A sequence of a batch.

    Attributes:
        q0: First query.
        q1: End of the queries, exclusive.
        keys: Ranges of positions, ascending.
        pre: Keys that the last query sees before the last key; INF for no limit.
        next: Keys that it would see after the last key.
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


FULL, CAUSAL = (INF, INF), (INF, 0)


@dataclass(frozen=True)
class VarlenBatch:
    """The sequences of one operator call, which share a band.

    Attributes:
        sequences: By ascending queries and keys.
        shift: Position of the first query minus position of the first key, if all sequences agree;
            else None, which does not occur if positions matter.
    """

    sequences: tuple[VarlenSequence, ...]
    shift: int | None

    @property
    def band(self) -> tuple[int, int]:
        """``(pre, next)``."""
        return self.sequences[0].band

    @functools.cached_property
    def probabilities(self) -> int:
        """Pairs of queries and keys of all sequences, masked ones included."""
        return sum((s.q1 - s.q0) * length(s.keys) for s in self.sequences)

    @functools.cached_property
    @with_values
    def cu_seqlens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cumulative lengths of queries and keys: ``[sequences + 1]`` int64 each, on the host."""
        queries = [0, *itertools.accumulate(s.q1 - s.q0 for s in self.sequences)]
        keys = [0, *itertools.accumulate(length(s.keys) for s in self.sequences)]
        return torch.tensor(queries), torch.tensor(keys)


def varlen_batches(regions: Sequence[Region], *, positions: bool = False) -> list[VarlenBatch]:
    """Group regions into operator calls.

    Args:
        regions: All queries are in one tensor, and all keys in one tensor.
        positions: The operator needs the distance of queries and keys (ALiBi), so the sequences of
            a batch must have the same shift and regions are not joined.
    """
    sequences = [sequence for region in regions for sequence in _sequences(region)]
    if not positions:
        sequences = list(_joined(sequences))
    found: dict[object, list[list[VarlenSequence]]] = {}
    for sequence in sorted(sequences):
        alike = found.setdefault((sequence.band, _shift(sequence) if positions else None), [])
        for batch in alike:
            last = batch[-1]
            if (
                last.q1 <= sequence.q0
                and last.keys[-1][1] <= sequence.keys[0][0]
                and len(batch) < MAX_SEQUENCES
            ):
                batch.append(sequence)
                break
        else:
            alike.append([sequence])
    return [_batch(batch) for alike in found.values() for batch in alike]


def _batch(sequences: Sequence[VarlenSequence]) -> VarlenBatch:
    shifts = {_shift(sequence) for sequence in sequences}
    return VarlenBatch(tuple(sequences), shifts.pop() if len(shifts) == 1 else None)


def _shift(sequence: VarlenSequence) -> int:
    return sequence.q0 - sequence.keys[0][0]


def _sequences(region: Region) -> Iterator[VarlenSequence]:
    q0, q1, k0, k1, lo, hi = region
    pre = INF if lo == -INF else k1 - q1 - lo
    next_ = INF if hi == INF else hi - (k1 - q1)
    if pre == INF and 0 < next_ < INF:
        # Query k1 - 1 - hi is the first to see all keys.
        yield VarlenSequence(q0, k1 - hi, ((k0, k1),), *CAUSAL)
        yield VarlenSequence(k1 - hi, q1, ((k0, k1),), *FULL)
    else:
        yield VarlenSequence(q0, q1, ((k0, k1),), pre, next_)


def _joined(sequences: Iterable[VarlenSequence]) -> Iterator[VarlenSequence]:
    """Join full rectangles of equal queries, also with the causal one of these queries."""
    full: dict[tuple[int, int], list[VarlenSequence]] = {}
    causal: dict[tuple[int, int], list[VarlenSequence]] = {}
    for sequence in sequences:
        if sequence.band == FULL:
            full.setdefault(sequence[:2], []).append(sequence)
        elif sequence.band == CAUSAL:
            causal.setdefault(sequence[:2], []).append(sequence)
        else:
            yield sequence
    for queries, alike in full.items():
        keys = tuple(sorted(part for sequence in alike for part in sequence.keys))
        last = causal.get(queries, [])
        if len(last) == 1 and keys[-1][1] <= last[0].keys[0][0]:
            yield VarlenSequence(*queries, (*keys, *causal.pop(queries)[0].keys), *CAUSAL)
        else:
            yield VarlenSequence(*queries, keys, *FULL)
    for alike in causal.values():
        yield from alike
