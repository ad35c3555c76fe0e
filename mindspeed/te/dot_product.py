"""``DotProductAttention``: the attention module, for all layouts Megatron uses.

    sbhd  [s, b, h, d]     bshd  [b, s, h, d]     thd  [t, h, d] with cu_seqlens (packed documents)

The output has heads and head size merged. The arithmetic is in :mod:`mindspeed.te.attention`, the
masks are in :mod:`mindspeed.te.masks`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import Parameter

from mindspeed.errors import ConfigError
from mindspeed.te import attention_policy, context_groups, kernels
from mindspeed.te.attention import Documents, each_document, max_logit, own_value
from mindspeed.te.base import TransformerEngineBaseModule, place, tensor_parallel_size
from mindspeed.te.masks import Mask, Window, visibility

if TYPE_CHECKING:
    from mindspeed.attention.mask import Mask as PlanMask
    from mindspeed.attention.packed import PackedBatch

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class DotProductAttention(TransformerEngineBaseModule):
    """Attention between already projected queries, keys and values.

    Args:
        num_attention_heads: Query heads of the whole model.
        kv_channels: Head size, or ``(key size, value size)``.
        num_gqa_groups: Key/value heads of the whole model.
        attention_dropout: Dropout on the probabilities.
        qkv_format: Default layout.
        attn_mask_type: Default mask type.
        window_size: Default sliding window.
        sequence_parallel: The trainer already runs the layer in the model-parallel RNG stream.
        tp_size: Tensor-parallel size.
        get_rng_state_tracker: Tracker whose stream dropout draws from.
        tp_group: Tensor-parallel group.
        layer_number: Number of the layer.
        attention_type: ``"self"`` or ``"cross"``.
        cp_group: Context-parallel group.
        cp_global_ranks: Global ranks of that group.
        cp_stream: Stream for its communication.
        cp_comm_type: How context parallelism communicates.
        softmax_scale: Factor on the scores; default ``1 / sqrt(key size)``.
        softmax_type: One of :data:`SOFTMAX_TYPES`.
        return_max_logit: Also return the largest score of each head.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        super().__init__()
        if softmax_type not in SOFTMAX_TYPES:
            raise ValueError(f"softmax_type {softmax_type!r} is not one of {SOFTMAX_TYPES}")
        if window_size is not None and not isinstance(window_size, (tuple, list)):
            raise TypeError(f"window_size must be a pair (left, right), not {window_size!r}")
        channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = channels
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format
        self.attn_mask_type, self._window = attn_mask_type, window_size
        self.attention_type, self.layer_number = attention_type, layer_number
        tp_size = tensor_parallel_size(tp_group, tp_size)
        self.tp_size, self.tp_group = tp_size, tp_group
        self.sequence_parallel = sequence_parallel
        self.get_rng_state_tracker = get_rng_state_tracker
        self.softmax_scale = channels[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.softmax_type, self.return_max_logit = softmax_type, return_max_logit
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.softmax_offset: torch.Tensor | None = None
        if softmax_type == "learnable":
            shape = (1, num_attention_heads // tp_size, 1, 1)
            self.softmax_offset = Parameter(torch.zeros(shape, device=place()))
        self.register_load_state_dict_post_hook(_forgive_missing_extra_state)

    @property
    def window_size(self) -> tuple[int, int]:
        """How many keys before and after its own position a query may see; -1: all of them."""
        if self._window is not None:
            return self._window
        return (-1, 0) if "causal" in self.attn_mask_type else (-1, -1)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Give the module its context-parallel group."""
        if cp_group is None and cp_global_ranks:
            raise ConfigError(
                f"cp_comm_type {cp_comm_type!r} over {len(cp_global_ranks)} ranks without its "
                "groups: give --hierarchical-context-parallel-sizes two numbers, ranks that "
                "exchange heads and ranks of a ring"
            )
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: Mask = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Window = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        packed: PackedBatch | None = None,
    ) -> Any:
        """Attend and return ``[s, b, h * d_v]`` (or the like for the other layouts).

        ``packed``, ours, says which documents the rows of an ``sbhd`` batch belong to.
        """
        self._refuse(checkpoint_core_attention)
        value_layer = own_value(query_layer, key_layer, value_layer, getattr(self, "config", None))
        layout = qkv_format or self.qkv_format
        mask_type = attn_mask_type or self.attn_mask_type
        window = self._window if window_size is None else window_size
        mask_type, window = attention_policy.mask_type_and_window(mask_type, window)
        bias = self._bias(core_attention_bias_type, core_attention_bias, alibi_slopes)
        if layout == "thd":
            if cu_seqlens_q is None or cu_seqlens_kv is None or bias is not None:
                raise ValueError("qkv_format 'thd' needs cu_seqlens_q/_kv and takes no bias")
            documents = Documents(
                cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded
            )
            qkv = (query_layer, key_layer, value_layer)
            if context_groups.group_size(self.cp_group) > 1:
                return self._split(*qkv, layout, mask_type, window, documents=documents)
            return self._packed(qkv, documents, mask_type, window)
        order = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}.get(layout)
        if order is None:
            raise ValueError(f"qkv_format {layout!r} is not one of sbhd, bshd, thd")
        mask = self._user_mask(query_layer, key_layer, layout, packed)
        if mask is not None or context_groups.group_size(self.cp_group) > 1:
            if bias is not None or "padding" in mask_type or "arbitrary" in mask_type:
                self._refuse_with_split_sequence(f"a bias or mask type {mask_type!r}")
            return self._split(
                query_layer, key_layer, value_layer, layout, mask_type, window,
                packed=packed, mask=mask,
            )  # fmt: skip
        if packed is not None and cu_seqlens_q is not None and cu_seqlens_kv is not None:
            q, k, v = (
                x.transpose(0, 1).flatten(0, 1) for x in (query_layer, key_layer, value_layer)
            )
            borders = Documents(cu_seqlens_q, cu_seqlens_kv)
            out = self._packed((q, k, v), borders, mask_type, window)
            return out.unflatten(0, (packed.samples, -1)).transpose(0, 1)
        q, k, v = (x.permute(order) for x in (query_layer, key_layer, value_layer))
        seen = visibility(
            mask_type,
            q.shape[2],
            k.shape[2],
            window=window,
            attention_mask=attention_mask,
            key_lengths=None if cu_seqlens_kv is None else cu_seqlens_kv.diff(),
            query_lengths=None if cu_seqlens_q is None else cu_seqlens_q.diff(),
            device=q.device,
        )
        with self._dropout_stream():
            out = kernels.attend(q, k, v, seen, bias=bias, **self._options(q))
        out = out.permute((2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)).flatten(2)
        if not self.return_max_logit:
            return out
        return out, max_logit(q, k, seen, scale=self.softmax_scale, bias=bias)

    def _split(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: str,
        mask_type: str,
        window: Window,
        *,
        documents: Documents | None = None,
        packed: PackedBatch | None = None,
        mask: PlanMask | None = None,
    ) -> torch.Tensor:
        """Attend by a plan: over a sequence that context-parallel ranks share, or by regions."""
        from mindspeed.te import context_parallel

        if self.return_max_logit:
            self._refuse_with_split_sequence("return_max_logit")
        if layout == "bshd":
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        strategy = attention_policy.context_strategy(
            self.cp_comm_type, context_groups.lowest_level(self.cp_group)
        )
        options = self._options(q) | {
            "causal": "causal" in mask_type, "window": window, "layer": self.layer_number or 1
        }  # fmt: skip
        with self._dropout_stream():
            if documents is not None:
                return context_parallel.attend_thd(
                    q, k, v, documents, self.cp_group, strategy, **options
                )
            out = context_parallel.attend(
                q, k, v, self.cp_group, strategy, packed=packed, mask=mask, **options
            )
        return out.transpose(0, 1) if layout == "bshd" else out

    def _user_mask(
        self, q: torch.Tensor, k: torch.Tensor, layout: str, packed: PackedBatch | None
    ) -> PlanMask | None:
        place = layout.index("s")
        if self.attention_type != "self" or q.shape[place] != k.shape[place]:
            return None
        length = q.shape[place] * context_groups.group_size(self.cp_group)
        return context_groups.user_mask(length, q.shape[1 - place], packed)

    def _refuse_with_split_sequence(self, what: str) -> None:
        raise NotImplementedError(
            f"--context-parallel-size {context_groups.group_size(self.cp_group)} "
            f"(--cp-comm-type {self.cp_comm_type}) does not work with {what} yet"
        )

    def _options(self, query: torch.Tensor) -> dict[str, Any]:
        return {
            "scale": self.softmax_scale,
            "dropout": self.attention_dropout if self.training else 0.0,
            "sink": self._sink(query),
            "slopes": self._slopes(query.device),
        }

    def _packed(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        documents: Documents,
        mask_type: str,
        window: Window,
    ) -> Any:
        with self._dropout_stream():
            out = kernels.attend_packed(
                *qkv, documents, mask_type, window=window, **self._options(qkv[0])
            )
        if not self.return_max_logit:
            return out
        logits = [
            max_logit(q, k, seen, scale=self.softmax_scale)
            for _, (q, k, _, seen) in each_document(*qkv, documents, mask_type, window)
            if q.shape[2] and k.shape[2]
        ]
        return out, torch.stack(logits).amax(0)

    def _dropout_stream(self) -> Any:
        quiet = self.sequence_parallel or self.get_rng_state_tracker is None
        if quiet or not (self.training and self.attention_dropout):
            return contextlib.nullcontext()
        return self.get_rng_state_tracker().fork()  # type: ignore[misc]

    def _sink(self, query: torch.Tensor) -> torch.Tensor | None:
        if self.softmax_type == "vanilla":
            return None
        if self.softmax_offset is None:
            return query.new_zeros(self.num_attention_heads // self.tp_size)
        return self.softmax_offset.flatten()

    def _slopes(self, device: torch.device) -> torch.Tensor | None:
        if self.attention_type != "self":
            return None
        heads = self.num_attention_heads // self.tp_size
        rank = torch.distributed.get_rank(self.tp_group) if self.tp_size > 1 else 0
        return attention_policy.alibi_slopes(self.num_attention_heads, rank * heads, heads, device)

    def _bias(
        self, kind: str, bias: torch.Tensor | None, alibi_slopes: torch.Tensor | None
    ) -> torch.Tensor | None:
        if kind == "no_bias":
            return None
        if kind == "post_scale_bias":
            return bias
        if kind == "pre_scale_bias" and bias is not None:
            return bias * self.softmax_scale
        raise NotImplementedError(
            f"core_attention_bias_type {kind!r} is not one of no_bias, pre_scale_bias, "
            f"post_scale_bias (alibi_slopes {'given' if alibi_slopes is not None else 'not given'})"
        )

    def _refuse(self, checkpoint_core_attention: bool) -> None:
        if checkpoint_core_attention:
            raise NotImplementedError(
                "checkpoint_core_attention: use --recompute-granularity selective instead"
            )


def _forgive_missing_extra_state(module: torch.nn.Module, incompatible: Any) -> None:
    """Checkpoints written without a fused attention module have no extra state for it."""
    for name in list(incompatible.missing_keys):
        if name.endswith("core_attention._extra_state"):
            incompatible.missing_keys.remove(name)
