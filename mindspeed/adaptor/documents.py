"""Patches of the seam ``documents``: packed documents through Megatron-LM's reading.

Megatron-LM's functions that read a batch and cut it are replaced by ours
(:mod:`mindspeed.adaptor.micro_batch`); its data set builds no s x s mask. How the documents reach
the layers: :mod:`mindspeed.adaptor.carrying`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from mindspeed.adaptor.carrying import carrying
from mindspeed.adaptor.micro_batch import cut_batch, read_batch
from mindspeed.adaptor.patch import Patch

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.attention.megatron import PlanParams
    from mindspeed.attention.packed import Borders

OWNER = "seam:documents"  # as seams.owner_of, which imports this module
VERSIONS = ">=0.16"


def patches(seams: Seams) -> tuple[Patch, ...]:
    """The patches that make Megatron carry documents."""
    return (
        reading(seams, OWNER),
        Patch(
            "megatron.core.utils:get_thd_batch_on_this_cp_rank",
            _take_part,
            OWNER,
            "the batch is cut by the layout of the context-parallel ranks",
            kind="replace",
            expects="(batch, cu_seqlens, cu_seqlens_padded, max_seqlen, cp_size, cp_rank)",
            versions=VERSIONS,
        ),
        Patch(
            "megatron.training.utils:is_first_or_last_pipeline_stage",
            lambda original: lambda vp_stage: True,
            OWNER,
            "inner pipeline stages read where documents begin",
            kind="replace",
            expects="(vp_stage)",
            versions=VERSIONS,
        ),
        Patch(
            "megatron.core.datasets.gpt_dataset:_get_ltor_masks_and_position_ids",
            _without_mask,
            OWNER,
            "the data set builds no mask",
            expects=(
                "(data, eod_token, reset_position_ids, reset_attention_mask, eod_mask_loss, "
                "create_attention_mask)"
            ),
            versions=VERSIONS,
        ),
        *carrying(OWNER, VERSIONS),
    )


def reading(seams: Seams, owner: str) -> Patch:
    """The patch of Megatron-LM's reading, which the seams ``documents`` and ``rows`` share."""
    return Patch(
        "megatron.training.utils:get_batch_on_this_tp_rank",
        lambda original: _broadcast(original, seams),
        owner,
        "lengths and documents reach every tensor-parallel rank",
        expects="(data_iterator, mtp_on_this_rank)",
        versions=VERSIONS,
    )


def _broadcast(original: Callable[..., Any], seams: Seams) -> Callable[..., Any]:
    def get_batch_on_this_tp_rank(
        data_iterator: Iterator[Any] | None, mtp_on_this_rank: bool = False
    ) -> dict[str, Any]:
        from megatron.core import parallel_state
        from megatron.training import get_args, get_tokenizer

        args = get_args()
        if args.hybrid_context_parallel or args.sft:
            return original(data_iterator, mtp_on_this_rank)  # type: ignore[no-any-return]
        alone = args.pipeline_model_parallel_size == 1 or mtp_on_this_rank
        read = read_batch(
            seams,
            data_iterator,
            get_tokenizer(),
            first=alone or parallel_state.is_pipeline_first_stage(),
            last=alone or parallel_state.is_pipeline_last_stage(),
            shape=None if args.variable_seq_lengths else (args.micro_batch_size, args.seq_length),
        )
        packing = {}
        if read.documents is not None:
            packing = {
                "cu_seqlens": torch.tensor(read.documents, dtype=torch.int32),
                "max_seqlen": torch.tensor([_longest(read.documents)], dtype=torch.int32),
            }
        return {**read.rows, "attention_mask": None, "position_ids": read.positions, **packing}

    return get_batch_on_this_tp_rank


def _longest(borders: Borders) -> int:
    return max(end - start for start, end in itertools.pairwise(borders))


def _take_part(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_thd_batch_on_this_cp_rank(
        batch: dict[str, Any],
        cu_seqlens: torch.Tensor,
        cu_seqlens_padded: torch.Tensor | None,
        max_seqlen: torch.Tensor,
        cp_size: int | None = None,
        cp_rank: int | None = None,
    ) -> tuple[dict[str, Any], PlanParams]:
        from megatron.training import get_args

        args = get_args()
        rows = next((x for x in batch.values() if x is not None), None)
        return cut_batch(
            batch,
            tuple(sorted(set(cu_seqlens.flatten().tolist()))),
            args.micro_batch_size if rows is None else rows.shape[0],
            reset_mask=args.reset_attention_mask or args.sft,
            reset_positions=args.reset_position_ids or args.sft,
        )

    return get_thd_batch_on_this_cp_rank


def _without_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_ltor_masks_and_position_ids(
        data: torch.Tensor,
        eod_token: int,
        reset_position_ids: bool,
        reset_attention_mask: bool,
        eod_mask_loss: bool,
        create_attention_mask: bool,
    ) -> Any:
        return original(data, eod_token, reset_position_ids, False, eod_mask_loss, False)

    return _get_ltor_masks_and_position_ids
