"""Patches of the seam ``documents``: packed documents through Megatron, from batch to attention.

The leader of a tensor-parallel group finds where documents begin in the tokens it reads; on inner
pipeline stages, too, which read the data for that. Each rank takes its tokens of the micro-batch
and puts documents, layout and positions into ``PlanParams`` (:mod:`mindspeed.attention.megatron`),
which Megatron hands to every layer as ``packed_seq_params``. What Megatron would do with it itself,
for rows of layout ``thd``, is turned off or replaced here:

* rotary embeddings take the positions of the micro-batch instead of counting;
* multi-latent attention does not squeeze rows;
* Transformer Engine's attention module gets the documents as an argument;
* multi-token prediction rolls whole rows.

A script that cuts its batches by the original's functions gives the model no argument;
``GPTModel.forward`` fetches it (:mod:`mindspeed.core.context_parallel.get_batch_utils`).

Nothing is remembered between calls: a layer that is computed again during the backward pass of
another micro-batch gets its own documents with its own arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mindspeed import device
from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind
from mindspeed.errors import ConfigError
from mindspeed.te import is_substitute

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.attention.megatron import PlanParams
    from mindspeed.attention.packed import Borders, PackedBatch

OWNER = "seam:documents"  # as seams.owner_of, which imports this module
VERSIONS = ">=0.16"
_EMBEDDINGS = "megatron.core.models.common.embeddings"


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
            _without_documents,
            OWNER,
            "the data set builds no mask",
            expects=(
                "(data, eod_token, reset_position_ids, reset_attention_mask, eod_mask_loss, "
                "create_attention_mask)"
            ),
            versions=VERSIONS,
        ),
        *carrying(),
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


def carrying() -> tuple[Patch, ...]:
    """The patches of the model alone: what reads the documents of a micro-batch."""
    return (
        Patch(
            "megatron.core.models.gpt.gpt_model:GPTModel.forward",
            _fetch_current,
            OWNER,
            "documents of a script that hands the model none",
            expects=(
                "(self, input_ids, position_ids, attention_mask, decoder_input, labels, "
                "inference_context, packed_seq_params, ...)"
            ),
            versions=VERSIONS,
        ),
        Patch(
            f"{_EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding.get_rotary_seq_len",
            _length_with_positions,
            OWNER,
            "the length of packed rows knows their positions",
            expects=(
                "(self, inference_context, transformer, transformer_input, transformer_config, "
                "packed_seq_params, ...)"
            ),
            versions=VERSIONS,
        ),
        *(
            Patch(
                f"{_EMBEDDINGS}.{where}.forward",
                _at_positions,
                OWNER,
                "rotary embedding at given positions",
                expects="(self, max_seq_len, offset, packed_seq, cp_group)",
                versions=VERSIONS,
            )
            for where in (
                "rotary_pos_embedding:RotaryEmbedding",
                "yarn_rotary_pos_embedding:YarnRotaryEmbedding",
            )
        ),
        Patch(
            "megatron.core.transformer.multi_latent_attention:"
            "MLASelfAttention.get_query_key_value_tensors",
            _rows_stay,
            OWNER,
            "rows are not squeezed",
            expects="(self, hidden_states, key_value_states, position_ids, packed_seq_params, ...)",
            versions=VERSIONS,
        ),
        Patch(
            "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
            _hand_over,
            OWNER,
            "the attention module gets the documents",
            expects=(
                "(self, query, key, value, attention_mask, attn_mask_type, attention_bias, "
                "packed_seq_params, ...)"
            ),
            versions=VERSIONS,
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:roll_tensor",
            _roll_rows,
            OWNER,
            "further tokens are predicted in rows, not across documents",
            expects="(tensor, shifts, dims, cp_group, packed_seq_params)",
            versions=VERSIONS,
        ),
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
    from mindspeed.te import kernels

    inside = _seen(documents, samples, reset_mask)
    strategy, mask = kernels.context_strategy(None, 1), kernels.layout_mask(inside, samples)
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
    from mindspeed.te import kernels

    ranks = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    inside = _seen(documents, samples, reset_mask)
    packed = pack(
        documents,
        samples,
        strategy=kernels.context_strategy(None, 1),
        ranks=ranks,
        rank=rank,
        reset_mask=reset_mask,
        reset_positions=reset_positions,
        mask=kernels.layout_mask(inside, samples),
        device=device.current().torch_device(),
    )
    part = {name: None if x is None else cut(x, packed, rank) for name, x in batch.items()}
    part["position_ids"] = packed.positions
    return part, PlanParams.of(packed)


def _without_documents(original: Callable[..., Any]) -> Callable[..., Any]:
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


def _fetch_current(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from mindspeed.core.context_parallel.get_batch_utils import current_params

        given = bind(original, (self, *args), kwargs)
        generates = given["inference_context"] or given.get("inference_params")
        if given["packed_seq_params"] is None and not generates:
            return original(**(given | {"packed_seq_params": current_params()}))
        return original(self, *args, **kwargs)

    return forward


class _PackedLength(int):
    """Length of a sample, and the documents of its micro-batch."""

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
        # ``packed_seq`` asks for the angles of all positions, of which none are cut out.
        table = original(self, int(max_seq_len), offset, True, cp_group)
        if isinstance(table, tuple):  # YaRN: angles and a factor
            return _angles(table[0], max_seq_len.packed), *table[1:]
        return _angles(table, max_seq_len.packed)

    forward.cache_clear = original.cache_clear  # type: ignore[attr-defined]
    return forward


def _angles(table: torch.Tensor, packed: PackedBatch) -> torch.Tensor:
    """``[tokens, samples, 1, d]`` of ``[positions, 1, 1, d]``."""
    return table[packed.positions.t()].squeeze(2)


def _rows_stay(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bind(original, (self, *args), kwargs)
        packed = getattr(given["packed_seq_params"], "packed", None)
        if packed is None:
            return original(self, *args, **kwargs)
        # For the time of this call: Megatron asks the embedding for a length without arguments.
        embedding = self.rotary_pos_emb.__dict__
        embedding["packed"] = packed
        try:
            return original(**(given | {"packed_seq_params": None}))
        finally:
            del embedding["packed"]

    return get_query_key_value_tensors


def _hand_over(original: Callable[..., Any]) -> Callable[..., Any]:
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


def _roll_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    def roll_tensor(
        tensor: torch.Tensor,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed = getattr(packed_seq_params, "packed", None)
        if packed is None:
            return original(  # type: ignore[no-any-return]
                tensor, shifts, dims, cp_group=cp_group, packed_seq_params=packed_seq_params
            )
        rolled, _ = original(tensor, shifts, dims, cp_group=cp_group)
        rolled = rolled.masked_fill(_is_last(packed, cp_group), 0)
        return rolled, rolled.sum()

    return roll_tensor


def _is_last(packed: PackedBatch, cp_group: Any) -> torch.Tensor:
    """``[samples, tokens]``: the last tokens of their documents, which have no successor."""
    ends = torch.zeros(packed.cu_seqlens[-1], dtype=torch.bool)
    ends[torch.tensor(packed.cu_seqlens[1:]) - 1] = True
    own = packed.rows(0 if cp_group is None else cp_group.rank())
    return ends[own].view(packed.samples, -1).to(packed.positions.device)
