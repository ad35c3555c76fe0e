"""Patches of the model for packed documents, whose ``packed_seq_params`` keep the layout ``sbhd``.

Documents, sharding and positions of a micro-batch go through Megatron as ``packed_seq_params``
(:class:`mindspeed.attention.megatron.PlanPackedSeqParams`). Megatron assumes layout ``thd``
wherever it gets this argument; that is replaced here:

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

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.repairs.layers.mtp import weighed
from mindspeed.adaptor.signatures import bind
from mindspeed.errors import ConfigError
from mindspeed.te import is_substitute

if TYPE_CHECKING:
    from mindspeed.attention.packed_batch import PackedBatch

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
