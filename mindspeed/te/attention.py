"""Scaled dot-product attention on ``[b, h, s, d]`` tensors: softmax(q k^T * scale + bias) v.

Fewer key/value heads than query heads (GQA, MQA) and a value head size other than that of the keys
(MLA) are allowed. The softmax runs in fp32 inside ``scaled_dot_product_attention``, which does not
keep the ``[b, h, s, s]`` scores; a packed batch costs only its documents' own blocks.

Bounded scores (``softcap``, Gemma 2) have no fused form: the plain formula keeps the scores.

An attention sink adds ``exp(alpha)`` to the denominator. That is one more key with value 0 and
score alpha, so it needs no second softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.device.host_tensors import with_values
from mindspeed.device.torch_versions import cpu_attention_groups_heads
from mindspeed.te.masks import Visibility, Window, visibility


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Visibility,
    *,
    scale: float,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Scaled dot-product attention.

    Args:
        query: ``[b, h, s_q, d]``.
        key: ``[b, h_kv, s_k, d]``; ``h_kv`` divides h.
        value: ``[b, h_kv, s_k, d_v]``.
        dropout: Probability of dropping a probability (default generator).
        bias: Added to the scaled scores, broadcastable to ``[b, h, s_q, s_k]``.
        slopes: ALiBi: fp32 ``[h]``, ``-slope * |i - j|`` is added to the scaled scores.
        sink: Attention sink: ``[h]`` score of an additional key with value 0.
        softcap: Scaled scores are ``softcap * tanh(score / softcap)``; not with a sink.

    Returns:
        ``[b, h, s_q, d_v]`` in the dtype of the inputs; the softmax is fp32.
    """
    if slopes is not None:
        from mindspeed.attention.alibi import alibi_bias

        linear = alibi_bias(slopes, query.shape[2], key.shape[2])
        bias = linear if bias is None else bias + linear
    mask, causal = seen.keep, seen.causal
    if softcap is not None:
        mask = _triangle(query, key) if causal else mask
        return _attend_bounded(query, key, value, mask, bias, scale, dropout, softcap)
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
    group = query.shape[1] // key.shape[1]
    if group > 1 and query.device.type == "cpu" and not cpu_attention_groups_heads():
        # Older torch would keep the scores, and compute those that the causal mask hides.
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
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


def _attend_bounded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout: float,
    cap: float,
) -> Tensor:
    """Attention by its formula, with fp32 scores ``[b, h, s_q, s_k]`` kept for backward."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * scale
    scores = torch.tanh(scores / cap) * cap
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = F.dropout(scores.softmax(-1).to(value.dtype), dropout)
    return weights @ value


def own_value(query: Tensor, key: Tensor, value: Tensor, config: Any) -> Tensor:
    """Return ``value``, copied where that lets the output of the fused qkv projection be freed.

    The values are a view of that output, and attention saves them for its backward, so the whole
    output stays in memory. Where queries and keys are new tensors (rotary embedding writes them), a
    copy of the values alone is smaller. Nothing is copied where queries or keys are still views of
    the output, or where their norms save it.

    Args:
        query: Queries, ``[s, b, n, d]`` or ``[t, n, d]``; any dtype. Only memory is looked at.
        key: Keys, ``[s, b, g, d]`` or ``[t, g, d]``.
        value: Values, ``[s, b, g, d_v]`` or ``[t, g, d_v]``.
        config: Megatron's transformer configuration of the layer; None counts as no norms.
    """
    norms_keep_it = getattr(config, "qk_layernorm", False)
    saved = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    storage = value.untyped_storage()
    alone = storage.nbytes() <= value.numel() * value.element_size()
    shared = any(x.untyped_storage()._cdata == storage._cdata for x in (query, key))
    if norms_keep_it or not saved or alone or shared:
        return value
    return value.clone(memory_format=torch.contiguous_format)


def _triangle(query: Tensor, key: Tensor) -> Tensor:
    size = (query.shape[2], key.shape[2])
    return torch.ones(size, dtype=torch.bool, device=query.device).tril()


def _with_sink(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sink: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
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


@dataclass(frozen=True)
class Documents:
    """Cumulative lengths of the documents of a packed batch, int32 ``[documents + 1]`` from 0.

    ``cu_seqlens_q`` and ``cu_seqlens_kv`` are sums of the real lengths; where documents are padded,
    the ``padded`` ones are sums of the padded lengths, where each document starts.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None

    @with_values
    def ranges(self) -> list[tuple[int, int, int, int]]:
        """Return ``(first query, first key, queries, keys)`` of each document."""
        at_q = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        at_k = self.cu_seqlens_kv
        at_k = at_k if self.cu_seqlens_kv_padded is None else self.cu_seqlens_kv_padded
        lengths = (self.cu_seqlens_q.diff().tolist(), self.cu_seqlens_kv.diff().tolist())
        return list(zip(at_q.tolist()[:-1], at_k.tolist()[:-1], *lengths, strict=True))


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    mask_type: str,
    *,
    scale: float,
    window: Window = None,
    dropout: float = 0.0,
    slopes: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend within each document of a packed batch.

    Args:
        query: ``[t, h, d]``, all documents concatenated.
        key: ``[t_kv, h_kv, d]``.
        value: ``[t_kv, h_kv, d_v]``.
        mask_type: Mask type inside a document; "padding" in its name has no other effect.
        dropout: Probability of dropping a probability (default generator).
        slopes: ALiBi: fp32 ``[h]``.
        softcap: Bound of the scaled scores, as in :func:`attend`.

    Returns:
        ``[t, h * d_v]`` in the dtype of the inputs; zero for padding between documents.
    """
    tokens, (heads, size) = query.shape[0], (query.shape[1], value.shape[-1])
    parts: list[Tensor] = []
    filled = 0
    options: dict[str, Any] = {"scale": scale, "dropout": dropout}
    options |= {"slopes": slopes, "sink": sink, "softcap": softcap}
    for start, (q, k, v, seen) in each_document(query, key, value, documents, mask_type, window):
        parts.append(query.new_zeros(start - filled, heads, size))
        out = attend(q, k, v, seen, **options)
        parts.append(out.squeeze(0).transpose(0, 1))
        filled = start + q.shape[2]
    parts.append(query.new_zeros(tokens - filled, heads, size))
    return torch.cat(parts).flatten(1)


def each_document(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, mask_type: str, window: Window
) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor, Visibility]]]:
    """Yield the first token of every document, its ``[1, h, s, d]`` tensors and visibility.

    Query, key and value are ``[t, h, d]`` of any dtype, which the views have, too.
    """
    q_all, k_all, v_all = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    for q0, k0, len_q, len_k in documents.ranges():
        kind = inside_document(mask_type)
        seen = visibility(kind, len_q, len_k, window=window, device=query.device)
        q = q_all[:, :, q0 : q0 + len_q]
        k, v = k_all[:, :, k0 : k0 + len_k], v_all[:, :, k0 : k0 + len_k]
        yield q0, (q, k, v, seen)


def inside_document(mask_type: str) -> str:
    """The mask type of a document alone, where there is no padding."""
    return mask_type.replace("padding_causal", "causal").replace("padding", "no_mask")


@torch.no_grad()
def max_logit(
    query: Tensor,
    key: Tensor,
    seen: Visibility,
    *,
    scale: float,
    bias: Tensor | None = None,
    block: int = 256,
) -> Tensor:
    """Return the largest visible score of each head, fp32 ``[h]``.

    Args:
        query: ``[b, h, s_q, d]``.
        key: ``[b, h_kv, s_k, d]``.
        bias: Added to the scaled scores, broadcastable to ``[b, h, s_q, s_k]``.
        block: Queries whose scores are in memory at a time.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    keep = _triangle(query, key) if seen.causal else seen.keep
    best = query.new_full((query.shape[1],), float("-inf"), dtype=torch.float32)
    for start in range(0, query.shape[2], block):
        part = slice(start, start + block)
        scores = (query[:, :, part].float() @ key.float().transpose(-1, -2)) * scale
        if bias is not None:
            scores = scores + _rows(bias, part)
        if keep is not None:
            scores = scores.masked_fill(~_rows(keep, part), float("-inf"))
        best = torch.maximum(best, scores.amax(dim=(0, 2, 3)))
    return best


def _rows(x: Tensor, part: slice) -> Tensor:
    return x if x.shape[-2] == 1 else x[..., part, :]
