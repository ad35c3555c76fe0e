"""Packed documents: several documents in one sample, which do not attend to each other.

    tokens      a b c E | d E | e f g h        E is the end-of-document token
    cu_seqlens  0         4     6         10

A batch is one long sequence of all its samples, and every end of a sample is in ``cu_seqlens``. A
:class:`PackedBatch` holds the documents of a micro-batch, its sharding and the position of every
token. It is passed through the model as an argument, so that a recomputation in the middle of
another micro-batch uses its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mindspeed.attention.mask import Mask
from mindspeed.attention.sequence_sharding import SequenceSharding, contiguous
from mindspeed.device.host_tensors import with_values
from mindspeed.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed.attention.strategy import Strategy

CuSeqlens = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The documents of one micro-batch, as one rank sees them.

    Attributes:
        cu_seqlens: Cumulative document lengths of the concatenated samples: from 0 to
            ``samples * size``, every end of a sample included.
        samples: Samples of the micro-batch, b.
        size: Tokens of a sample, of all context-parallel ranks, s.
        sharding: The tokens of every rank, in the concatenated samples.
        positions: ``[b, s / cp]`` int64, the position of each of this rank's tokens for the
            position embedding: in its document, or in its sample.
    """

    cu_seqlens: CuSeqlens
    samples: int
    size: int
    sharding: SequenceSharding
    positions: torch.Tensor

    def mask(self, *, causal: bool = True, window: tuple[int, int] | None = None) -> Mask:
        """The mask of all samples.

        Args:
            causal: A query sees no later key.
            window: A query sees this many keys before and after it; None for all.
        """
        return document_mask(self.cu_seqlens, causal, window)

    def rows(self, rank: int) -> torch.Tensor:
        """The positions in the concatenated samples of a rank's tokens: ``[b * s / cp]`` int64."""
        return self.sharding.positions(rank)


@functools.lru_cache(maxsize=64)  # the same for all layers of a kind
def document_mask(
    cu_seqlens: CuSeqlens, causal: bool = True, window: tuple[int, int] | None = None
) -> Mask:
    """``Mask.documents``, cached by arguments."""
    return Mask.documents(cu_seqlens, causal=causal, window=window)


def cu_seqlens_of_tokens(tokens: torch.Tensor, eod: int) -> CuSeqlens:
    """``cu_seqlens`` with a boundary after each end-of-document token.

    Args:
        tokens: int64 ``[b, s]`` on the host.
        eod: The end-of-document token, the last of its document.
    """
    return _with_samples(torch.nonzero(tokens.reshape(-1) == eod).flatten() + 1, tokens.shape)


def cu_seqlens_of_starts(starts: torch.Tensor) -> CuSeqlens:
    """``cu_seqlens`` with a boundary before each first token of a document.

    Args:
        starts: ``[b, s]`` bool on the host, true where a document begins.
    """
    return _with_samples(torch.nonzero(starts.reshape(-1)).flatten(), starts.shape)


def starts_of(documents: CuSeqlens, samples: int) -> torch.Tensor:
    """``[b, s]`` bool, true where a document begins."""
    starts = torch.zeros(documents[-1], dtype=torch.bool)
    starts[list(documents[:-1])] = True
    return starts.view(samples, -1)


def cu_seqlens_of_length(samples: int, size: int, length: int) -> CuSeqlens:
    """``cu_seqlens`` of documents of ``length`` tokens; the last one of a sample may be shorter.

    Raises:
        ConfigError: The length is less than 1.
    """
    if length < 1:
        raise ConfigError(f"--fix-sub-seq-length {length} must be at least 1")
    inside = range(0, size, length)
    return (*(n * size + at for n in range(samples) for at in inside), samples * size)


def cu_seqlens_of_samples(samples: int, size: int) -> CuSeqlens:
    """``cu_seqlens`` of whole samples."""
    return tuple(range(0, samples * size + 1, size))


def _with_samples(inside: torch.Tensor, shape: Sequence[int]) -> CuSeqlens:
    samples, size = shape
    ends = torch.arange(0, samples * size + 1, size)
    return tuple(torch.unique(torch.cat([inside, ends])).tolist())


def positions_of(cu_seqlens: CuSeqlens) -> torch.Tensor:
    """The position of every token in its document: ``[b * s]`` int64."""
    bounds = torch.tensor(cu_seqlens)
    starts = bounds[:-1].repeat_interleave(bounds.diff())
    return torch.arange(cu_seqlens[-1]) - starts


def pack(
    documents: CuSeqlens,
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
    """Shard a micro-batch over the ranks of a context-parallel group, without communication.

    Args:
        documents: ``cu_seqlens`` of the documents of the concatenated samples.
        samples: Number of samples, of equal length.
        strategy: The context-parallel algorithm, which chooses the sharding.
        ranks: Size of the group.
        rank: This rank in the group.
        reset_mask: Documents do not attend to each other; otherwise samples do not.
        reset_positions: Positions restart with every document; otherwise with every sample.
        mask: The mask that the sharding is chosen for; by default the causal mask of documents.
        device: Of the positions.
    """
    size = documents[-1] // samples
    cu_seqlens = documents if reset_mask else cu_seqlens_of_samples(samples, size)
    if ranks == 1:
        sharding = contiguous(size, 1, samples)
    else:
        sharding = strategy.sharding(mask or document_mask(cu_seqlens), ranks, samples)
    positions = _positions_on(rank, sharding, documents, samples, reset_positions)
    positions = positions.to(device, non_blocking=True)
    return PackedBatch(cu_seqlens, samples, size, sharding, positions)


@with_values
def _positions_on(
    rank: int, sharding: SequenceSharding, documents: CuSeqlens, samples: int, reset: bool
) -> torch.Tensor:
    """``[b, s / cp]`` int64 on the host, as :attr:`PackedBatch.positions` says."""
    own = sharding.positions(rank)
    positions = positions_of(documents)[own] if reset else own % (documents[-1] // samples)
    return positions.view(samples, -1)


def shard(tensor: torch.Tensor, batch: PackedBatch, rank: int) -> torch.Tensor:
    """The tokens of a rank: ``[b, s]`` to ``[b, s / cp]``, any dtype."""
    if batch.sharding.ranks == 1:
        return tensor
    own = batch.rows(rank).to(tensor.device, non_blocking=True)
    return tensor.reshape(-1).index_select(0, own).view(batch.samples, -1)


def adaptive(arguments: Mapping[str, Any]) -> bool:
    """Do ranks own other tokens than the zigzag of Megatron's batches?"""
    return (arguments.get("context_parallel_size") or 1) > 1 and arguments.get(
        "context_parallel_algo"
    ) in ("adaptive_cp_algo", "hybrid_adaptive_cp_algo")


def resets(arguments: Mapping[str, Any]) -> bool:
    """Does anything begin again with a document?"""
    names = ("reset_attention_mask", "reset_position_ids", "pack_sequences")
    return any(arguments.get(name) for name in names) or _splits_conversations(arguments)


def _splits_conversations(arguments: Mapping[str, Any]) -> bool:
    """``--sft`` packs by itself, but Megatron needs Transformer Engine to shard its samples."""
    return bool(arguments.get("sft")) and (arguments.get("context_parallel_size") or 1) > 1
