"""A micro-batch of a pipeline stage: read, broadcast, planned, sharded over context-parallel ranks.

Tensor-parallel rank 0 finds the documents in the tokens that it reads; inner pipeline stages read
the data, too, for that. Each rank takes its shard of the micro-batch and puts documents, sharding
and positions into ``PlanPackedSeqParams`` (:mod:`mindspeed.attention.megatron`), which Megatron
passes to every layer (:mod:`mindspeed.adaptor.packed_documents`).

The broadcast is one collective: every tensor is sent as int64, where fp32 keeps its bits. Bytes per
micro-batch and rank: ``8 * b * s`` for each tensor, and 16 for the shape where it varies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.adaptor.seam import SeamTable

if TYPE_CHECKING:
    from mindspeed.attention.megatron import PlanPackedSeqParams
    from mindspeed.attention.packed_batch import CuSeqlens


@dataclass(frozen=True)
class FullBatch:
    """A micro-batch on every rank of a tensor-parallel group, before context-parallel sharding.

    Attributes:
        tensors: ``tokens``, ``labels`` (int64), ``loss_mask`` (fp32) and what else was asked for,
            ``[b, s]``; None for tensors this stage does not need.
        position_ids: int64 ``[b, s]``, counted; None if this stage needs none or documents have
            their own.
        cu_seqlens: Of the packed documents, samples concatenated; None without packed documents.
        samples: b.
        seq_length: s.
    """

    tensors: dict[str, torch.Tensor | None]
    position_ids: torch.Tensor | None
    cu_seqlens: CuSeqlens | None
    samples: int
    seq_length: int


def read_batch(
    seams: SeamTable,
    iterator: Iterator[Any] | None,
    tokenizer: Any,
    *,
    pre_process: bool,
    post_process: bool,
    shape: tuple[int, int] | None,
    documents: Callable[[Any], CuSeqlens] | None = None,
    more: Sequence[str] = (),
) -> FullBatch:
    """Read a micro-batch on tensor-parallel rank 0 and broadcast it. Collective over its group.

    Args:
        seams: Functions of the seams ``batch`` and ``documents`` get the tensors that were read.
        iterator: Yields collated samples on tensor-parallel rank 0, None on the others.
        tokenizer: Knows the end-of-document token.
        pre_process: This stage embeds tokens.
        post_process: This stage computes the loss.
        shape: ``(b, s)``, None where only rank 0 knows it.
        documents: Returns ``cu_seqlens`` of a batch, instead of the seam ``documents``.
        more: Names of further tensors ``[b, s]`` that a loss needs.
    """
    from megatron.core import parallel_state

    from mindspeed.attention.packed_batch import (
        cu_seqlens_of_samples,
        cu_seqlens_of_starts,
        starts_of,
    )

    names = [
        *(["tokens"] if pre_process else []),
        *(["labels", "loss_mask", *more] if post_process else []),
    ]
    packed, group = (
        bool(seams.documents.functions),
        parallel_state.get_tensor_model_parallel_group(),
    )
    if packed and group.size() > 1:
        names.append("starts")
    read: dict[str, torch.Tensor] | None = None
    cu_seqlens: CuSeqlens | None = None
    if iterator is not None:
        read = seams.batch.pipe(dict(next(iterator)))
        if packed:
            tokens = read["tokens"]
            if documents is None:
                samples_alone = cu_seqlens_of_samples(*tokens.shape)
                cu_seqlens = seams.documents.pipe(samples_alone, tokens, tokenizer)
            else:
                cu_seqlens, seams.documents.reached = documents(read), True
            read["starts"] = starts_of(cu_seqlens, len(tokens))
    here = device.current().torch_device()
    received, (samples, length) = broadcast_batch(read, names, shape, group, here)
    positions = None
    if packed and cu_seqlens is None:
        cu_seqlens = cu_seqlens_of_starts(received["starts"].cpu())
    elif pre_process and not packed:
        positions = torch.arange(length, device=here).repeat(samples, 1)
    wanted = {name: received.get(name) for name in ("tokens", "labels", "loss_mask", *more)}
    return FullBatch(wanted, positions, cu_seqlens, samples, length)


def plan_batch(cu_seqlens: CuSeqlens, samples: int, *, reset_mask: bool) -> None:
    """Compute sharding and attention plan of a micro-batch, for the caches that layers look up.

    On the host only, and without communication: a thread may do it while another one trains.

    Args:
        cu_seqlens: Of all documents, samples concatenated.
        samples: Samples of the micro-batch, b.
        reset_mask: Documents do not attend to each other.
    """
    from megatron.core import parallel_state

    from mindspeed.attention.packed_batch import document_mask
    from mindspeed.te import attention_policy

    inside = _attended(cu_seqlens, samples, reset_mask)
    strategy, mask = (
        attention_policy.context_strategy(None, 1),
        attention_policy.sharding_mask(inside, samples),
    )
    mask = mask or document_mask(inside)
    ranks = parallel_state.get_context_parallel_world_size()
    strategy.plan(mask, strategy.sharding(mask, ranks, samples))


def _attended(cu_seqlens: CuSeqlens, samples: int, reset_mask: bool) -> CuSeqlens:
    """``cu_seqlens`` of the sequences that attention keeps apart."""
    from mindspeed.attention.packed_batch import cu_seqlens_of_samples

    return cu_seqlens if reset_mask else cu_seqlens_of_samples(samples, cu_seqlens[-1] // samples)


def shard_batch(
    batch: dict[str, Any],
    cu_seqlens: CuSeqlens,
    samples: int,
    *,
    reset_mask: bool,
    reset_positions: bool,
) -> tuple[dict[str, Any], PlanPackedSeqParams]:
    """This context-parallel rank's shard of a micro-batch. No communication.

    Args:
        batch: ``[b, s]`` tensors by name, None for tensors this stage does not need.
        cu_seqlens: Of all documents, samples concatenated.
        samples: Samples of the micro-batch, b.
        reset_mask: Documents do not attend to each other.
        reset_positions: Positions restart at each document.

    Returns:
        ``[b, tokens of this rank]`` tensors by name, and the ``packed_seq_params`` of the model.
    """
    from megatron.core import parallel_state

    from mindspeed.attention.megatron import PlanPackedSeqParams
    from mindspeed.attention.packed_batch import pack, shard
    from mindspeed.te import attention_policy

    ranks = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    inside = _attended(cu_seqlens, samples, reset_mask)
    packed = pack(
        cu_seqlens,
        samples,
        strategy=attention_policy.context_strategy(None, 1),
        ranks=ranks,
        rank=rank,
        reset_mask=reset_mask,
        reset_positions=reset_positions,
        mask=attention_policy.sharding_mask(inside, samples),
        device=device.current().torch_device(),
    )
    part = {name: None if x is None else shard(x, packed, rank) for name, x in batch.items()}
    part["position_ids"] = packed.positions
    return part, PlanPackedSeqParams.of(packed)


_FLOATS = {"loss_mask", "values", "references"}


def broadcast_batch(
    tensors: Mapping[str, torch.Tensor] | None,
    names: Sequence[str],
    shape: tuple[int, int] | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[dict[str, torch.Tensor], tuple[int, int]]:
    """Broadcast tensors by name. Collective over the group.

    Args:
        tensors: int64, fp32 (``loss_mask``, ...) or bool ``[b, s]`` on rank 0 of the group, None
            on the others.
        names: Which of them the group needs.
        shape: ``(b, s)``, or None where only rank 0 knows it.
        group: The tensor-parallel group.
        device: Of the results.

    Returns:
        The tensors, int64 or fp32 ``[b, s]``, and ``(b, s)``.
    """
    if shape is None:
        shape = _broadcast_shape(
            None if tensors is None else tensors["tokens"].shape, group, device
        )
    if not names:
        return {}, shape
    if tensors is not None:
        words = torch.stack([_words(tensors[name]) for name in names]).to(device, non_blocking=True)
    else:
        words = torch.empty((len(names), *shape), dtype=torch.int64, device=device)
    if group.size() > 1:
        dist.broadcast(words, group=group, group_src=0)
    values = {name: _values(name, word) for name, word in zip(names, words.unbind(), strict=True)}
    return values, shape


def _broadcast_shape(
    shape: Sequence[int] | None, group: dist.ProcessGroup, device: torch.device
) -> tuple[int, int]:
    if group.size() > 1:
        known = torch.tensor(shape or (0, 0), device=device)
        dist.broadcast(known, group=group, group_src=0)
        shape = shape or known.tolist()
    assert shape is not None
    return shape[0], shape[1]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.view(torch.int32) if tensor.is_floating_point() else tensor).to(torch.int64)


def _values(name: str, words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.int32).view(torch.float32) if name in _FLOATS else words


def trim_untrained_tail(
    tensors: Mapping[str, torch.Tensor], multiple: int
) -> dict[str, torch.Tensor]:
    """The tensors without the columns after the last one that has a loss in any sample.

    Args:
        tensors: ``[b, s]`` tensors by name, with ``loss_mask`` (fp32, 0 where not trained).
        multiple: The new length is a multiple of this, or the old length.
    """
    size = tensors["loss_mask"].shape[1]
    trained = torch.nonzero(tensors["loss_mask"].amax(0)).flatten()
    needed = int(trained[-1]) + 1 if len(trained) else 1
    width = min(-(-needed // multiple) * multiple, size)
    return {
        name: x[:, :width] if x.dim() == 2 and x.shape[1] == size else x
        for name, x in tensors.items()
    }
