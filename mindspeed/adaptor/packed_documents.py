"""Patches of the seam ``documents``: how packed documents reach Megatron's batches and layers.

Megatron-LM's functions that read a micro-batch and shard it over context-parallel ranks are
replaced by ours (:mod:`mindspeed.adaptor.micro_batch`); its data set builds no s x s mask.

Documents, sharding and positions of a micro-batch go through Megatron as ``packed_seq_params``
(:class:`mindspeed.attention.megatron.PlanPackedSeqParams`). Megatron assumes layout ``thd``
wherever it gets this argument; they keep the layout ``sbhd``, so the model is patched:

* rotary embeddings use the positions of the micro-batch instead of counting from 0;
* multi-latent attention does not squeeze the batch dimension;
* Transformer Engine's attention module gets the documents as an argument;
* multi-token prediction rolls whole samples and masks the last token of each document.

A script that shards its batches by the original's functions passes no such argument to the model;
``GPTModel.forward`` takes it from :mod:`mindspeed.adaptor.current_batch`.

Nothing is stored between calls: a layer recomputed during the backward pass of another micro-batch
gets the documents of its own micro-batch with its arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from mindspeed.adaptor.micro_batch import read_batch, shard_batch
from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.pipeline_ends import pipeline_ends, readers_patches
from mindspeed.adaptor.repairs.layers.mtp import weighed
from mindspeed.adaptor.seam import SeamTable, owner_of
from mindspeed.adaptor.signatures import bind
from mindspeed.adaptor.versions import at_least, batch_functions
from mindspeed.errors import ConfigError
from mindspeed.te import is_substitute

if TYPE_CHECKING:
    from mindspeed.attention.megatron import PlanPackedSeqParams
    from mindspeed.attention.packed_batch import CuSeqlens, PackedBatch

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


_EMBEDDINGS = "megatron.core.models.common.embeddings"


def model_patches(owner: str, versions: str) -> tuple[Patch, ...]:
    """The patches of the model: everything that reads ``packed_seq_params``."""
    return (
        Patch(
            "megatron.core.models.gpt.gpt_model:GPTModel.forward",
            _pass_current_batch,
            owner,
            "packed_seq_params of a script that passes none",
            expects=(
                "(self, input_ids, position_ids, attention_mask, decoder_input, labels, "
                "inference_context, packed_seq_params, ...)"
            ),
            versions=versions,
        ),
        Patch(
            f"{_EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding.get_rotary_seq_len",
            _length_with_positions,
            owner,
            "the rotary length carries the positions of packed documents",
            expects=(
                "(self, inference_context, transformer, transformer_input, transformer_config, "
                "packed_seq_params, ...)"
            ),
            versions=versions,
        ),
        *(
            Patch(
                f"{_EMBEDDINGS}.{where}.forward",
                _at_positions,
                owner,
                "rotary embedding at given positions",
                expects="(self, max_seq_len, offset, packed_seq, cp_group)",
                versions=versions,
            )
            for where in (
                "rotary_pos_embedding:RotaryEmbedding",
                "yarn_rotary_pos_embedding:YarnRotaryEmbedding",
            )
        ),
        Patch(
            "megatron.core.transformer.multi_latent_attention:"
            "MLASelfAttention.get_query_key_value_tensors",
            _keep_batch_dimension,
            owner,
            "the batch dimension is not squeezed",
            expects="(self, hidden_states, key_value_states, position_ids, packed_seq_params, ...)",
            versions=versions,
        ),
        Patch(
            "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
            _pass_documents,
            owner,
            "the attention module gets the documents",
            expects=(
                "(self, query, key, value, attention_mask, attn_mask_type, attention_bias, "
                "packed_seq_params, ...)"
            ),
            versions=versions,
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:roll_tensor",
            _roll_samples,
            owner,
            "multi-token prediction does not cross documents",
            expects="(tensor, shifts, dims, cp_group, packed_seq_params, ...)",
            versions=versions,
        ),
    )


def _pass_current_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from mindspeed.adaptor.current_batch import current_params

        given = bind(original, (self, *args), kwargs)
        generates = given["inference_context"] or given.get("inference_params")
        if given["packed_seq_params"] is None and not generates:
            return original(**(given | {"packed_seq_params": current_params()}))
        return original(self, *args, **kwargs)

    return forward


class _PackedLength(int):
    """The length of a sample that carries the documents of its micro-batch."""

    packed: PackedBatch


def _length_with_positions(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_rotary_seq_len(self: Any, *args: Any, **kwargs: Any) -> int:
        given = bind(original, (self, *args), kwargs)
        packed = getattr(given["packed_seq_params"], "packed", None) or self.__dict__.get("packed")
        if packed is None:
            return original(self, *args, **kwargs)  # type: ignore[no-any-return]
        length = _PackedLength(packed.size)
        length.packed = packed
        return length

    return get_rotary_seq_len


def _at_positions(original: Any) -> Any:
    def forward(
        self: Any, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> Any:
        if not isinstance(max_seq_len, _PackedLength):
            return original(self, max_seq_len, offset, packed_seq, cp_group)
        # packed_seq=True: the angles of all positions, not those of this context-parallel rank.
        table = original(self, int(max_seq_len), offset, True, cp_group)
        if isinstance(table, tuple):  # YaRN: angles and a factor
            return _angles(table[0], max_seq_len.packed), *table[1:]
        return _angles(table, max_seq_len.packed)

    forward.cache_clear = original.cache_clear  # type: ignore[attr-defined]
    return forward


def _angles(table: torch.Tensor, packed: PackedBatch) -> torch.Tensor:
    """``[tokens, b, 1, d]`` from ``[positions, 1, 1, d]``."""
    return table[packed.positions.t()].squeeze(2)


def _keep_batch_dimension(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bind(original, (self, *args), kwargs)
        packed = getattr(given["packed_seq_params"], "packed", None)
        if packed is None:
            return original(self, *args, **kwargs)
        # For this call only: here Megatron calls get_rotary_seq_len without packed_seq_params.
        embedding = self.rotary_pos_emb.__dict__
        embedding["packed"] = packed
        try:
            return original(**(given | {"packed_seq_params": None}))
        finally:
            del embedding["packed"]

    return get_query_key_value_tensors


def _pass_documents(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bind(original, (self, *args), kwargs)
        if getattr(given["packed_seq_params"], "packed", None) is None:
            return original(self, *args, **kwargs)
        if not is_substitute():
            raise ConfigError(
                "packed documents (--reset-attention-mask, adaptive_cp_algo) need this library's "
                "attention: set MINDSPEED_TE=substitute, or use --transformer-impl local"
            )
        kept = self.kept_packed_seq_params
        self.kept_packed_seq_params = {"qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "packed"}
        try:
            return original(self, *args, **kwargs)
        finally:
            self.kept_packed_seq_params = kept

    return forward


def _roll_samples(original: Callable[..., Any]) -> Callable[..., Any]:
    def roll_tensor(
        tensor: torch.Tensor,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed = getattr(packed_seq_params, "packed", None)
        if packed is None or tensor is None:  # since 0.19 there need be no positions
            return original(  # type: ignore[no-any-return]
                tensor, shifts, dims, cp_group, packed_seq_params, **named
            )
        rolled, _ = original(tensor, shifts, dims, cp_group=cp_group, **named)
        rolled = rolled.masked_fill(_is_last(packed, cp_group), 0)
        return weighed(rolled, tensor, cp_group)

    return roll_tensor


def _is_last(packed: PackedBatch, cp_group: Any) -> torch.Tensor:
    """bool ``[b, tokens]``: the last token of each document, which has no next token."""
    ends = torch.zeros(packed.cu_seqlens[-1], dtype=torch.bool)
    ends[torch.tensor(packed.cu_seqlens[1:]) - 1] = True
    own = packed.rows(0 if cp_group is None else cp_group.rank())
    return ends[own].view(packed.samples, -1).to(packed.positions.device)
