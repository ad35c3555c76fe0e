"""``DotProductAttention``: softmax(q k^T * scale + bias) v for all layouts Megatron uses.

    sbhd  [s, b, h, d]     bshd  [b, s, h, d]     thd  [t, h, d] with cu_seqlens (packed documents)

Fewer key/value heads than query heads (GQA, MQA) and a value head size other than that of the keys
(MLA) are allowed. The softmax runs in fp32 inside ``scaled_dot_product_attention``, which does not
keep the ``[b, h, s, s]`` scores; a packed batch costs only its documents' own blocks. The output
has heads and head size merged.

An attention sink (``softmax_type`` off-by-one or learnable) adds ``exp(alpha)`` to the denominator.
That is one more key with value 0 and score alpha, so it needs no second softmax.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parameter import Parameter

from mindspeed.te.base import TransformerEngineBaseModule, place
from mindspeed.te.masks import Mask, Visibility, Window, visibility

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: Visibility,
    *,
    scale: float,
    dropout: float = 0.0,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend; all tensors are ``[b, h, s, d]``, the result ``[b, h, s, d_v]``.

    Args:
        query: Queries.
        key: Keys, with as many heads as the queries or a divisor of that.
        value: Values.
        seen: Which key each query sees.
        scale: Factor on the scores.
        dropout: Probability of dropping a probability (default generator).
        bias: Added to the scaled scores, broadcastable to ``[b, h, s_q, s_k]``.
        sink: ``[h]`` scores of the key that is not there.
    """
    mask, causal = seen.keep, seen.causal
    if causal and (bias is not None or sink is not None):
        mask, causal = _triangle(query, key), False
    if sink is not None:
        query, key, value, mask, bias = _with_sink(query, key, value, mask, bias, sink, scale)
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        mask = mask.to(query.dtype)
    size_v = value.shape[-1]
    if not dropout and size_v < key.shape[-1]:
        value = F.pad(value, (0, key.shape[-1] - size_v))
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[..., :size_v]


def _triangle(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    size = (query.shape[2], key.shape[2])
    return torch.ones(size, dtype=torch.bool, device=query.device).tril()


def _with_sink(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Append the sink: one key whose score is ``sink[h]`` and whose value is zero.

    Queries get one more component, 1, which meets a 0 in every real key and ``sink / scale`` in the
    sink's. Key/value heads are repeated because the sink belongs to a query head.
    """
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    query = torch.cat([query, query.new_ones(*query.shape[:-1], 1)], dim=-1)
    extra = key.new_zeros(*key.shape[:2], 1, key.shape[-1])
    score = (sink / scale).to(key.dtype).view(1, heads, 1, 1).expand(*key.shape[:2], 1, 1)
    key = torch.cat([F.pad(key, (0, 1)), torch.cat([extra, score], dim=-1)], dim=2)
    value = F.pad(value, (0, 0, 0, 1))
    if mask is not None:
        mask = F.pad(mask.expand(*mask.shape[:-1], key.shape[2] - 1), (0, 1), value=True)
    if bias is not None:
        bias = F.pad(bias.expand(*bias.shape[:-1], key.shape[2] - 1), (0, 1))
    return query, key, value, mask, bias  # type: ignore[return-value]


@torch.no_grad()
def max_logit(
    query: torch.Tensor,
    key: torch.Tensor,
    seen: Visibility,
    *,
    scale: float,
    bias: torch.Tensor | None = None,
    rows: int = 256,
) -> torch.Tensor:
    """Return ``[h]`` largest visible scores, looking at ``rows`` queries at a time."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    keep = _triangle(query, key) if seen.causal else seen.keep
    best = query.new_full((query.shape[1],), float("-inf"), dtype=torch.float32)
    for start in range(0, query.shape[2], rows):
        part = slice(start, start + rows)
        scores = (query[:, :, part].float() @ key.float().transpose(-1, -2)) * scale
        if bias is not None:
            scores = scores + _rows(bias, part)
        if keep is not None:
            scores = scores.masked_fill(~_rows(keep, part), float("-inf"))
        best = torch.maximum(best, scores.amax(dim=(0, 2, 3)))
    return best


def _rows(x: torch.Tensor, part: slice) -> torch.Tensor:
    return x if x.shape[-2] == 1 else x[..., part, :]


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
        channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = channels
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.attention_type, self.layer_number = attention_type, layer_number
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

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Give the module its context-parallel group."""
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
    ) -> Any:
        """Attend and return ``[s, b, h * d_v]`` (or the like for the other layouts)."""
        self._refuse(checkpoint_core_attention)
        layout = qkv_format or self.qkv_format
        mask_type = attn_mask_type or self.attn_mask_type
        window = self.window_size if window_size is None else window_size
        bias = self._bias(core_attention_bias_type, core_attention_bias, alibi_slopes)
        if layout == "thd":
            if cu_seqlens_q is None or cu_seqlens_kv is None or bias is not None:
                raise ValueError("qkv_format 'thd' needs cu_seqlens_q/_kv and takes no bias")
            bounds = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
            return self._packed((query_layer, key_layer, value_layer), bounds, mask_type, window)
        order = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}.get(layout)
        if order is None:
            raise ValueError(f"qkv_format {layout!r} is not one of sbhd, bshd, thd")
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
            out = self._attend(q, k, v, seen, bias)
        out = out.permute((2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)).flatten(2)
        if not self.return_max_logit:
            return out
        return out, max_logit(q, k, seen, scale=self.softmax_scale, bias=bias)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seen: Visibility,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return attend(
            q,
            k,
            v,
            seen,
            scale=self.softmax_scale,
            dropout=self.attention_dropout if self.training else 0.0,
            bias=bias,
            sink=self._sink(q),
        )

    def _packed(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        bounds: tuple[torch.Tensor | None, ...],
        mask_type: str,
        window: Window,
    ) -> Any:
        """Attend within each document of a packed batch; padding between documents gives zeros."""
        real_q, real_k = (bounds[i].diff().tolist() for i in (0, 1))  # type: ignore[union-attr]
        at_q, at_k = ((bounds[i] if bounds[i + 2] is None else bounds[i + 2]) for i in (0, 1))
        starts = zip(at_q.tolist(), at_k.tolist(), real_q, real_k, strict=False)  # type: ignore[union-attr]
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in qkv)
        kind = mask_type.replace("padding_causal", "causal").replace("padding", "no_mask")
        parts: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        filled = 0
        with self._dropout_stream():
            for q0, k0, len_q, len_k in starts:
                q = query[:, :, q0 : q0 + len_q]
                k, v = key[:, :, k0 : k0 + len_k], value[:, :, k0 : k0 + len_k]
                seen = visibility(kind, len_q, len_k, window=window, device=q.device)
                parts += [_gap(qkv[0], qkv[2], q0 - filled)]
                parts += [self._attend(q, k, v, seen).squeeze(0).transpose(0, 1)]
                filled = q0 + len_q
                if self.return_max_logit and len_q and len_k:
                    logits.append(max_logit(q, k, seen, scale=self.softmax_scale))
        parts.append(_gap(qkv[0], qkv[2], qkv[0].shape[0] - filled))
        out = torch.cat(parts).flatten(1)
        return (out, torch.stack(logits).amax(0)) if self.return_max_logit else out

    def _dropout_stream(self) -> Any:
        quiet = self.sequence_parallel or self.get_rng_state_tracker is None
        if quiet or not (self.training and self.attention_dropout):
            return contextlib.nullcontext()
        return self.get_rng_state_tracker().fork()  # type: ignore[misc]

    def _sink(self, query: torch.Tensor) -> torch.Tensor | None:
        if self.softmax_type == "vanilla":
            return None
        if self.softmax_offset is None:
            return query.new_zeros(query.shape[1])
        return self.softmax_offset.flatten()

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
        groups = self.cp_group if isinstance(self.cp_group, list) else [self.cp_group]
        size = 1
        for group in groups:
            size *= 1 if group is None else group.size()
        if size > 1:
            raise NotImplementedError(
                f"--context-parallel-size {size} with --cp-comm-type {self.cp_comm_type}: attention "
                "over a split sequence is provided by the context-parallel feature, which is not "
                "active; use --context-parallel-size 1"
            )
        if checkpoint_core_attention:
            raise NotImplementedError(
                "checkpoint_core_attention: use --recompute-granularity selective instead"
            )


def _gap(query: torch.Tensor, value: torch.Tensor, rows: int) -> torch.Tensor:
    return query.new_zeros(rows, query.shape[1], value.shape[-1])


def _forgive_missing_extra_state(module: torch.nn.Module, incompatible: Any) -> None:
    """Checkpoints written without a fused attention module have no extra state for it."""
    for name in list(incompatible.missing_keys):
        if name.endswith("core_attention._extra_state"):
            incompatible.missing_keys.remove(name)
