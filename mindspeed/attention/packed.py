"""Packed documents: several in one row, which do not see each other.

    tokens   a b c E | d E | e f g h        E ends its document
    borders  0         4     6         10   cu_seqlens

A batch is one long sequence of all its samples, and so are its borders: a sample's end is one, too.
A :class:`PackedBatch` says where documents begin, who owns which tokens and at which position each
token stands; it goes with its micro-batch through the model as an argument, so that a recomputation
in the middle of another micro-batch finds its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mindspeed.attention.layout import Layout, contiguous
from mindspeed.attention.mask import Mask
from mindspeed.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed.attention.strategy import Strategy

Borders = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The documents of one micro-batch, as one rank sees them.

    Attributes:
        cu_seqlens: Borders of the documents of all samples, one behind the other: the first is 0,
            the last ``samples * size``, and every sample's end is one of them.
        samples: Samples of the micro-batch.
        size: Tokens of a sample, of all context-parallel ranks.
        layout: Who owns which tokens of the samples, one behind the other.
        positions: ``[samples, tokens]`` int64, the position of each of this rank's tokens for the
            position embedding: in its document, or in its sample.
    """

    cu_seqlens: Borders
    samples: int
    size: int
    layout: Layout
    positions: torch.Tensor

    def mask(self, *, causal: bool = True, window: tuple[int, int] | None = None) -> Mask:
        """What the tokens of all samples see.

        Args:
            causal: A query sees no key behind it.
            window: A query sees this many keys before and behind it; None for all.
        """
        return document_mask(self.cu_seqlens, causal, window)

    def rows(self, rank: int) -> torch.Tensor:
        """Which of the tokens, counted over all samples, a rank owns: int64, in its order."""
        return self.layout.positions(rank)


@functools.lru_cache(maxsize=64)  # the same for all layers of a kind
def document_mask(
    cu_seqlens: Borders, causal: bool = True, window: tuple[int, int] | None = None
) -> Mask:
    """``Mask.documents``, made once for equal borders."""
    return Mask.documents(cu_seqlens, causal=causal, window=window)


def borders_of_tokens(tokens: torch.Tensor, eod: int) -> Borders:
    """Borders behind each end of document.

    Args:
        tokens: ``[samples, size]`` on the host.
        eod: The token that ends a document and belongs to it.
    """
    return _with_samples(torch.nonzero(tokens.reshape(-1) == eod).flatten() + 1, tokens.shape)


def borders_of_starts(starts: torch.Tensor) -> Borders:
    """Borders before each first token.

    Args:
        starts: ``[samples, size]`` on the host, true where a document begins.
    """
    return _with_samples(torch.nonzero(starts.reshape(-1)).flatten(), starts.shape)


def starts_of(documents: Borders, samples: int) -> torch.Tensor:
    """``[samples, size]`` bool, true where a document begins."""
    starts = torch.zeros(documents[-1], dtype=torch.bool)
    starts[list(documents[:-1])] = True
    return starts.view(samples, -1)


def borders_of_length(samples: int, size: int, length: int) -> Borders:
    """Borders every ``length`` tokens of a sample; its last document may be shorter.

    Raises:
        ConfigError: The length is less than 1.
    """
    if length < 1:
        raise ConfigError(f"--fix-sub-seq-length {length} must be at least 1")
    inside = range(0, size, length)
    return (*(n * size + at for n in range(samples) for at in inside), samples * size)


def borders_of_samples(samples: int, size: int) -> Borders:
    """Borders between samples only."""
    return tuple(range(0, samples * size + 1, size))


def _with_samples(inside: torch.Tensor, shape: Sequence[int]) -> Borders:
    samples, size = shape
    ends = torch.arange(0, samples * size + 1, size)
    return tuple(torch.unique(torch.cat([inside, ends])).tolist())


def positions_of(cu_seqlens: Borders) -> torch.Tensor:
    """The position of every token in its document, of all samples: int64."""
    borders = torch.tensor(cu_seqlens)
    starts = borders[:-1].repeat_interleave(borders.diff())
    return torch.arange(cu_seqlens[-1]) - starts


def pack(
    documents: Borders,
    samples: int,
    *,
    strategy: Strategy,
    ranks: int = 1,
    rank: int = 0,
    reset_mask: bool = True,
    reset_positions: bool = True,
    mask: Mask | None = None,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Lay a micro-batch out over the ranks of a context-parallel group; no communication.

    Args:
        documents: Borders of the documents of all samples, one behind the other.
        samples: Samples of equal length.
        strategy: The algorithm that shares the sequence; it chooses the layout.
        ranks: Size of the group.
        rank: This rank in it.
        reset_mask: Documents do not see each other; otherwise samples do not.
        reset_positions: Positions start again with every document; otherwise with every sample.
        mask: What the layout is made for, where that is not the documents' causal mask.
        device: Where the positions are wanted.
    """
    size = documents[-1] // samples
    cu_seqlens = documents if reset_mask else borders_of_samples(samples, size)
    if ranks == 1:
        layout = contiguous(size, 1, samples)
    else:
        layout = strategy.layout(mask or document_mask(cu_seqlens), ranks, samples)
    own = layout.positions(rank)
    positions = positions_of(documents)[own] if reset_positions else own % size
    positions = positions.view(samples, -1).to(device, non_blocking=True)
    return PackedBatch(cu_seqlens, samples, size, layout, positions)


def cut(tensor: torch.Tensor, batch: PackedBatch, rank: int) -> torch.Tensor:
    """The part of ``[samples, size]`` that a rank owns: ``[samples, tokens]``."""
    if batch.layout.ranks == 1:
        return tensor
    own = batch.rows(rank).to(tensor.device, non_blocking=True)
    return tensor.reshape(-1).index_select(0, own).view(batch.samples, -1)
