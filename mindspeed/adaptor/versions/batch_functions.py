"""Megatron-LM's batch functions since 0.18: its script reads, megatron.core broadcasts and shards.

The script builds ``packed_seq_params`` itself from the borders that come back. Those of documents
do not come back: the model takes them from :mod:`mindspeed.adaptor.current_batch`, as with a script
that shards its batches by the original's functions. Its function for zigzag chunks needs the group,
and is told about hybrid context parallelism, which this library does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.arguments import script_arguments
from mindspeed.adaptor.micro_batch import read_batch, shard_batch
from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.pipeline_ends import pipeline_ends
from mindspeed.adaptor.seam import SeamTable
from mindspeed.adaptor.signatures import bind
from mindspeed.adaptor.versions import at_least

VERSIONS = ">=0.18"
_TENSORS = ("tokens", "labels", "loss_mask")
_KEYS = (
    *_TENSORS,
    *("attention_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded", "max_seqlen"),
    *("local_cp_size", "hybrid_cp_group"),
)


def broadcast_patch(seams: SeamTable, owner: str) -> Patch:
    """The patch of the broadcast over tensor-parallel ranks."""
    return Patch(
        "megatron.core.utils:get_batch_on_this_tp_rank",
        lambda original: _broadcast(original, seams),
        owner,
        "one broadcast: the batch, its shape and its documents",
        expects={
            "<0.19": "(batch, is_sft, is_hybrid_cp, create_attention_mask_in_dataloader, ...)",
            ">=0.19": "(batch, has_cu_seqlens, is_hybrid_cp, "
            "create_attention_mask_in_dataloader, ...)",
        },
        versions=VERSIONS,
    )


def shard_patch(owner: str) -> Patch:
    """The patch of the shards of context-parallel ranks."""
    return Patch(
        "megatron.core.utils:get_batch_on_this_cp_rank",
        _shard,
        owner,
        "the batch is sharded as the context-parallel algorithm needs it",
        expects="(batch, is_hybrid_cp, ...)",
        versions=VERSIONS,
    )


def flatten_patch(owner: str) -> Patch:
    """The patch of what packs samples with documents into one, since 0.19."""
    return Patch(
        "megatron.core.utils:flatten_batch_for_packed_sequences",
        _keep_samples,
        owner,
        "samples whose documents were found here stay samples",
        expects="(batch)",
        versions=">=0.19",
    )


def _keep_samples(original: Callable[..., Any]) -> Callable[..., Any]:
    def flatten_batch_for_packed_sequences(batch: dict[str, Any]) -> dict[str, Any]:
        values = script_arguments()
        if values is None or values.sft or values.hybrid_context_parallel:
            return original(batch)  # type: ignore[no-any-return]
        return batch

    return flatten_batch_for_packed_sequences


def _broadcast(original: Callable[..., Any], seams: SeamTable) -> Callable[..., Any]:
    def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> dict[str, Any]:
        given, values = bind(original, args, kwargs), script_arguments()
        if values is None or values.sft or given["is_hybrid_cp"]:
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        from megatron.training import get_tokenizer

        first, last = pipeline_ends(seams, None)
        if given["pipeline_model_parallel_size"] == 1 or given["mtp_on_this_rank"]:
            first = last = True
        varies = values.variable_seq_lengths or getattr(values, "optimized_pipeline", False)
        read = read_batch(
            seams,
            iter([given["batch"]]) if given["tp_rank"] == 0 else None,
            get_tokenizer(),
            pre_process=first,
            post_process=last,
            shape=None if varies else (given["micro_batch_size"], given["seq_length"]),
        )
        batch = dict.fromkeys(_KEYS) | read.tensors | {"position_ids": read.position_ids}
        if read.cu_seqlens is not None:  # [1, n], as Megatron's own
            batch["cu_seqlens"] = torch.tensor([read.cu_seqlens], dtype=torch.int32)
        return batch

    return get_batch_on_this_tp_rank


def _shard(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_batch_on_this_cp_rank(*args: Any, **kwargs: Any) -> dict[str, Any]:
        from mindspeed.adaptor.current_batch import set_current_params

        given, values = bind(original, args, kwargs), script_arguments()
        batch: dict[str, Any] = given["batch"]
        cu_seqlens = batch.get("cu_seqlens")
        if values is None or cu_seqlens is None or given["is_hybrid_cp"]:
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        tensors = {name: batch[name] for name in _TENSORS}
        some = next((x for x in tensors.values() if x is not None), None)
        part, params = shard_batch(
            tensors,
            tuple(sorted(set(cu_seqlens.flatten().tolist()))),
            values.micro_batch_size if some is None else some.shape[0],
            reset_mask=values.reset_attention_mask or values.sft,
            reset_positions=values.reset_position_ids or values.sft,
        )
        set_current_params(params)
        return dict.fromkeys(_KEYS) | part

    return get_batch_on_this_cp_rank


def zigzag_chunks(batch: dict[str, Any]) -> dict[str, Any]:
    """The context-parallel rank's two chunks of tensors ``[b, s]`` and masks ``[b, 1, s, s]``."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    options: dict[str, Any] = {}
    if at_least("0.18"):
        options = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
    return get_batch_on_this_cp_rank(batch, **options)  # type: ignore[no-any-return]
