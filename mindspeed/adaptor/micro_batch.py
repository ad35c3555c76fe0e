"""A micro-batch of a pipeline stage: read and handed on, planned, and cut over context ranks.

The leader of a tensor-parallel group finds where documents begin in the tokens it reads; on inner
pipeline stages, too, which read the data for that. Each rank takes its tokens of the micro-batch
and puts documents, layout and positions into ``PlanParams`` (:mod:`mindspeed.attention.megatron`),
which Megatron hands to every layer (:mod:`mindspeed.adaptor.carrying`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mindspeed import device

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.attention.megatron import PlanParams
    from mindspeed.attention.packed import Borders


@dataclass(frozen=True)
class Read:
    """One micro-batch on a rank of a tensor-parallel group, not yet cut over context ranks.

    Attributes:
        rows: ``tokens``, ``labels``, ``loss_mask`` ``[b, s]``, or None for what a stage needs not.
        positions: ``[b, s]``, counted; None where a stage needs none or documents have their own.
        documents: Borders of the documents where they are packed.
        length: Tokens of a row, s.
    """

    rows: dict[str, torch.Tensor | None]
    positions: torch.Tensor | None
    documents: Borders | None
    length: int


def read_batch(
    seams: Seams,
    iterator: Iterator[Any] | None,
    tokenizer: Any,
    *,
    first: bool,
    last: bool,
    shape: tuple[int, int] | None,
    documents: Callable[[Any], Borders] | None = None,
) -> Read:
    """Read a micro-batch on the leader of the tensor-parallel group and hand it on.

    Args:
        seams: Functions of the seams ``rows`` and ``documents`` see what the leader read.
        iterator: Yields collated samples on the leader, None on the others.
        tokenizer: Knows which token ends a document.
        first: The stage embeds tokens.
        last: The stage computes the loss.
        shape: ``(b, s)``, None where lengths vary.
        documents: Borders of a sample's documents, instead of what the seam finds in its tokens.
    """
    from megatron.core import parallel_state

    from mindspeed.adaptor.rows import broadcast_rows
    from mindspeed.attention.packed import borders_of_samples, borders_of_starts, starts_of

    names = [*(["tokens"] if first else []), *(["labels", "loss_mask"] if last else [])]
    packed, group = (
        bool(seams.documents.functions),
        parallel_state.get_tensor_model_parallel_group(),
    )
    if packed and group.size() > 1:
        names.append("starts")
    rows: dict[str, torch.Tensor] | None = None
    borders: Borders | None = None
    if iterator is not None:
        rows = seams.rows.pipe(dict(next(iterator)))
        if packed:
            tokens = rows["tokens"]
            alone = borders_of_samples(*tokens.shape)
            found = documents(rows) if documents else None
            borders = found or seams.documents.pipe(alone, tokens, tokenizer)
            rows["starts"] = starts_of(borders, len(tokens))
    here = device.current().torch_device()
    received, (samples, length) = broadcast_rows(rows, names, shape, group, here)
    positions = None
    if packed and borders is None:
        borders = borders_of_starts(received["starts"].cpu())
    elif first and not packed:
        positions = torch.arange(length, device=here).repeat(samples, 1)
    wanted = {name: received.get(name) for name in ("tokens", "labels", "loss_mask")}
    return Read(wanted, positions, borders, length)


def plan_batch(documents: Borders, samples: int, *, reset_mask: bool) -> None:
    """Find layout and plan of a micro-batch: :func:`cut_batch` and the layers have them at hand.

    On the host only, and without communication: a thread may do it while others train.

    Args:
        documents: Borders of all documents, the samples one behind the other.
        samples: Samples of the micro-batch.
        reset_mask: Documents do not see each other.
    """
    from megatron.core import parallel_state

    from mindspeed.attention.packed import document_mask
    from mindspeed.te import attention_policy

    inside = _seen(documents, samples, reset_mask)
    strategy, mask = (
        attention_policy.context_strategy(None, 1),
        attention_policy.sharding_mask(inside, samples),
    )
    mask = mask or document_mask(inside)
    ranks = parallel_state.get_context_parallel_world_size()
    strategy.plan(mask, strategy.layout(mask, ranks, samples))


def _seen(documents: Borders, samples: int, reset_mask: bool) -> Borders:
    from mindspeed.attention.packed import borders_of_samples

    return documents if reset_mask else borders_of_samples(samples, documents[-1] // samples)


def cut_batch(
    batch: dict[str, Any],
    documents: Borders,
    samples: int,
    *,
    reset_mask: bool,
    reset_positions: bool,
) -> tuple[dict[str, Any], PlanParams]:
    """This rank's part of a micro-batch, and what its attention must know.

    Args:
        batch: ``[samples, size]`` tensors, None for what this stage does not need.
        documents: Borders of all documents, the samples one behind the other.
        samples: Samples of the micro-batch.
        reset_mask: Documents do not see each other.
        reset_positions: Positions start again with each document.
    """
    from megatron.core import parallel_state

    from mindspeed.attention.megatron import PlanParams
    from mindspeed.attention.packed import cut, pack
    from mindspeed.te import attention_policy

    ranks = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    inside = _seen(documents, samples, reset_mask)
    packed = pack(
        documents,
        samples,
        strategy=attention_policy.context_strategy(None, 1),
        ranks=ranks,
        rank=rank,
        reset_mask=reset_mask,
        reset_positions=reset_positions,
        mask=attention_policy.sharding_mask(inside, samples),
        device=device.current().torch_device(),
    )
    part = {name: None if x is None else cut(x, packed, rank) for name, x in batch.items()}
    part["position_ids"] = packed.positions
    return part, PlanParams.of(packed)
