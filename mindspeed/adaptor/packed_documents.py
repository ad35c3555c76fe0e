"""Packed-document patches of the seam ``documents``: Megatron-LM's batch functions.

Megatron-LM's functions that read a micro-batch and shard it over context-parallel ranks are
replaced by ours (:mod:`mindspeed.adaptor.micro_batch`); its data set builds no s x s mask. How the
documents reach the layers: :mod:`mindspeed.adaptor.packed_seq_params`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from mindspeed.adaptor.micro_batch import read_batch, shard_batch
from mindspeed.adaptor.packed_seq_params import model_patches
from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.pipeline_ends import pipeline_ends, readers_patches
from mindspeed.adaptor.seam import SeamTable, owner_of
from mindspeed.adaptor.versions import at_least, batch_functions

if TYPE_CHECKING:
    from mindspeed.attention.megatron import PlanPackedSeqParams
    from mindspeed.attention.packed_batch import CuSeqlens

OWNER = owner_of("documents")
VERSIONS = ">=0.16"
_BEFORE_0_18 = ">=0.16,<0.18"  # later: mindspeed.adaptor.versions.batch_functions


def patches(seams: SeamTable) -> tuple[Patch, ...]:
    """The patches that make Megatron find documents and pass them to its layers."""
    return (
        *read_patches(seams, OWNER),
        batch_functions.shard_patch(OWNER),
        batch_functions.flatten_patch(OWNER),
        Patch(
            "megatron.core.utils:get_thd_batch_on_this_cp_rank",
            _shard,
            OWNER,
            "the batch is sharded as the context-parallel algorithm needs it",
            kind="replace",
            expects="(batch, cu_seqlens, cu_seqlens_padded, max_seqlen, cp_size, cp_rank)",
            versions=_BEFORE_0_18,
        ),
        *readers_patches(seams, OWNER),
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
        *model_patches(OWNER, VERSIONS),
    )


def read_patches(seams: SeamTable, owner: str) -> tuple[Patch, ...]:
    """The patches of Megatron-LM's batch reader: of ``documents``, ``batch``, ``pipeline_ends``."""
    return (
        Patch(
            "megatron.training.utils:get_batch_on_this_tp_rank",
            lambda original: _broadcast(original, seams),
            owner,
            "one broadcast: the batch, its shape and its documents",
            expects={">=0.16": "(data_iterator, mtp_on_this_rank)", "<0.16": "(data_iterator)"},
            versions=">=0.15,<0.18",
        ),
        batch_functions.broadcast_patch(seams, owner),
    )


def _broadcast(original: Callable[..., Any], seams: SeamTable) -> Callable[..., Any]:
    def get_batch_on_this_tp_rank(
        data_iterator: Iterator[Any] | None, mtp_on_this_rank: bool = False
    ) -> dict[str, Any]:
        from megatron.training import get_args, get_tokenizer

        args = get_args()
        first, last = pipeline_ends(seams, None)
        if not at_least("0.16"):  # the layers that predict tokens are in the last stage
            mtp_on_this_rank = last and bool(args.mtp_num_layers)
        if args.pipeline_model_parallel_size == 1 or mtp_on_this_rank:
            first = last = True
        if args.sft or getattr(args, "hybrid_context_parallel", False):
            whole = [first and last] if at_least("0.16") else []
            return original(data_iterator, *whole)  # type: ignore[no-any-return]
        read = read_batch(
            seams,
            data_iterator,
            get_tokenizer(),
            pre_process=first,
            post_process=last,
            shape=_shape(args),
        )
        packing: dict[str, torch.Tensor] = {}
        if read.cu_seqlens is not None:
            packing = {
                "cu_seqlens": torch.tensor(read.cu_seqlens, dtype=torch.int32),
                "max_seqlen": torch.tensor([_longest(read.cu_seqlens)], dtype=torch.int32),
            }
        return {
            **read.tensors,
            "attention_mask": None,
            "position_ids": read.position_ids,
            **packing,
        }

    return get_batch_on_this_tp_rank


def _shape(args: Any) -> tuple[int, int] | None:
    """``(b, s)`` of every micro-batch; None where it varies."""
    if args.variable_seq_lengths or getattr(args, "optimized_pipeline", False):
        return None
    return args.micro_batch_size, args.seq_length


def _longest(cu_seqlens: CuSeqlens) -> int:
    return max(end - start for start, end in itertools.pairwise(cu_seqlens))


def _shard(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_thd_batch_on_this_cp_rank(
        batch: dict[str, Any],
        cu_seqlens: torch.Tensor,
        cu_seqlens_padded: torch.Tensor | None,
        max_seqlen: torch.Tensor,
        cp_size: int | None = None,
        cp_rank: int | None = None,
    ) -> tuple[dict[str, Any], PlanPackedSeqParams]:
        from megatron.training import get_args

        args = get_args()
        some = next((x for x in batch.values() if x is not None), None)
        return shard_batch(
            batch,
            tuple(sorted(set(cu_seqlens.flatten().tolist()))),
            args.micro_batch_size if some is None else some.shape[0],
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
