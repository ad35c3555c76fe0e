"""``DotProductAttention``: the attention module, for all layouts Megatron uses.

    sbhd  [s, b, h, d]     bshd  [b, s, h, d]     thd  [t, h, d] with cu_seqlens (packed documents)

The output has heads and head size merged. The module describes its call; which attention runs is
decided in :mod:`mindspeed.te.core_attention`. The arithmetic is in :mod:`mindspeed.te.attention`,
the masks are in :mod:`mindspeed.te.masks`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from mindspeed.errors import ConfigError
from mindspeed.te import attention_policy, core_attention
from mindspeed.te.attention import Documents
from mindspeed.te.base import TransformerEngineBaseModule, tensor_parallel_size, torch_device
from mindspeed.te.core_attention import AttentionCall
from mindspeed.te.masks import Mask, Visibility, Window, visibility

if TYPE_CHECKING:
    from mindspeed.attention.packed_batch import PackedBatch

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class DotProductAttention(TransformerEngineBaseModule):
    """Attention between already projected queries, keys and values.

    Args:
        kv_channels: Head size, or ``(key size, value size)``.
        sequence_parallel: The trainer already runs the layer in the model-parallel RNG stream.
        get_rng_state_tracker: Tracker whose stream dropout draws from.
        attention_type: ``"self"`` or ``"cross"``.
        softmax_scale: Factor on the scores; default ``1 / sqrt(key size)``.
        softmax_type: One of :data:`SOFTMAX_TYPES`.
        return_max_logit: Also return the largest score of each head.

    Attributes:
        softcap: Bound of the scaled scores, by tanh, ours; set on the built module.
    """

    softcap: float | None = None

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
        self.softmax_offset: Tensor | None = None
        if softmax_type == "learnable":
            heads = num_attention_heads // tp_size
            self.softmax_offset = Parameter(torch.zeros(heads, device=torch_device()))
        self.register_load_state_dict_post_hook(_forgive_missing_extra_state)

    @property
    def window_size(self) -> tuple[int, int]:
        """Keys before and after its own position that a query sees; -1: all of them."""
        if self._window is not None:
            return self._window
        return (-1, 0) if "causal" in self.attn_mask_type else (-1, -1)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        if cp_group is None and cp_global_ranks:
            raise ConfigError(
                f"cp_comm_type {cp_comm_type!r} over {len(cp_global_ranks)} ranks without its "
                "groups: give --hierarchical-context-parallel-sizes two numbers, ranks that "
                "exchange heads (Ulysses) and ranks of a ring"
            )
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Mask = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Window = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        packed: PackedBatch | None = None,
        pad_between_seqs: bool | None = None,
    ) -> Any:
        """Attend and return ``[s, b, h * d_v]``, ``[b, s, h * d_v]`` or ``[t, h * d_v]``.

        Query, key and value have one floating dtype, which the result has, too; shapes are
        ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]``, as ``qkv_format`` says.
        ``packed``, ours, says which documents the tokens of an ``sbhd`` batch belong to. The other
        arguments are those of Transformer Engine's module; whether there is padding between
        sequences (``pad_between_seqs``) the padded ``cu_seqlens`` say.
        """
        del pad_between_seqs
        self._refuse(checkpoint_core_attention)
        layout = qkv_format or self.qkv_format
        bias = self._bias(core_attention_bias_type, core_attention_bias, alibi_slopes)
        cu_seqlens = (cu_seqlens_q, cu_seqlens_kv)
        given = cu_seqlens_q is not None and cu_seqlens_kv is not None
        if layout not in ("sbhd", "bshd", "thd"):
            raise ValueError(f"qkv_format {layout!r} is not one of sbhd, bshd, thd")
        if layout == "thd" and (not given or bias is not None):
            raise ValueError("qkv_format 'thd' needs cu_seqlens_q/_kv and takes no bias")
        mask_type, window = attention_policy.mask_type_and_window(
            attn_mask_type or self.attn_mask_type,
            self._window if window_size is None else window_size,
        )

        def visible() -> Visibility:
            sequence = layout.index("s")
            return visibility(
                mask_type,
                query_layer.shape[sequence],
                key_layer.shape[sequence],
                window=window,
                attention_mask=attention_mask,
                key_lengths=None if cu_seqlens_kv is None else cu_seqlens_kv.diff(),
                query_lengths=None if cu_seqlens_q is None else cu_seqlens_q.diff(),
                device=query_layer.device,
            )

        documents = Documents(*cu_seqlens) if given else None  # type: ignore[arg-type]
        thd = None
        if layout == "thd":
            thd = Documents(*cu_seqlens, cu_seqlens_q_padded, cu_seqlens_kv_padded)  # type: ignore[arg-type]
        call = AttentionCall(
            layout=layout,
            mask_type=mask_type,
            window=window,
            visibility=visible,
            scale=self.softmax_scale,
            dropout=self.attention_dropout if self.training else 0.0,
            random_stream=self._dropout_stream,
            bias=bias,
            slopes=self._slopes(query_layer.device),
            sink=self._sink(query_layer),
            documents=thd,
            packed=packed,
            packed_documents=documents,
            self_attention=self.attention_type == "self",
            groups=self.cp_group,
            comm_type=self.cp_comm_type,
            layer=self.layer_number or 1,
            max_logit=self.return_max_logit,
            softcap=self.softcap,
            config=getattr(self, "config", None),
        )
        return core_attention.attend(query_layer, key_layer, value_layer, call)

    def _dropout_stream(self) -> Any:
        quiet = self.sequence_parallel or self.get_rng_state_tracker is None
        if quiet or not (self.training and self.attention_dropout):
            return contextlib.nullcontext()
        return self.get_rng_state_tracker().fork()  # type: ignore[misc]

    def _sink(self, query: Tensor) -> Tensor | None:
        if self.softmax_type == "vanilla":
            return None
        if self.softmax_offset is None:
            return query.new_zeros(self.num_attention_heads // self.tp_size)
        return self.softmax_offset

    def _slopes(self, device: torch.device) -> Tensor | None:
        if self.attention_type != "self":
            return None
        heads = self.num_attention_heads // self.tp_size
        rank = torch.distributed.get_rank(self.tp_group) if self.tp_size > 1 else 0
        return attention_policy.alibi_slopes(self.num_attention_heads, rank * heads, heads, device)

    def _bias(self, kind: str, bias: Tensor | None, alibi_slopes: Tensor | None) -> Tensor | None:
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
