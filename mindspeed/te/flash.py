"""Core attention by the fused operator :mod:`mindspeed.ops.attention`.

Same arguments as the formulas of :mod:`mindspeed.te.attention`, which a feature replaces by these
(:mod:`mindspeed.te.kernels`). Windows, causal masks and documents are passed as numbers; a mask
tensor is read only where Megatron passes one.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed.attention.alibi import alibi_bias
from mindspeed.attention.triangle import blocks
from mindspeed.device.host_tensors import numbers, with_values
from mindspeed.ops.attention import attention
from mindspeed.ops.attention_problem import ALIBI, BIAS_AFTER_SCALE
from mindspeed.ops.visibility import BAND, EVERYTHING, MASK_ONLY, UNCUT, tile_of
from mindspeed.te.attention import Documents, inside_document
from mindspeed.te.attention import attend as attend_at_once
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
) -> Tensor:
    """Attend with ``[b, h, s, d]`` of one dtype; see :func:`mindspeed.te.attention.attend`."""
    # Megatron's tensors are views of [s, b, h, d] or [b, s, h, d]: no kernel copies them when they
    # are passed in that order.
    layout, order, back = "SBND", (2, 0, 1, 3), (1, 2, 0, 3)
    if query.stride(2) < query.stride(0):
        layout, order, back = "BSND", (0, 2, 1, 3), (0, 2, 1, 3)
    if bias is not None and slopes is not None:
        bias = bias + alibi_bias(slopes, query.shape[2], key.shape[2])
        slopes = None
    q, k, v = (x.permute(order) for x in (query, key, value))
    out, _ = attention(
        q,
        k,
        v,
        layout=layout,
        scale=scale,
        dropout=dropout,
        sink=sink,
        **_position_bias(bias, slopes, key.shape[2] - query.shape[2]),
        **_mask_options(seen),
    )
    return out.permute(back)


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
) -> Tensor:
    """Attend within documents of ``[t, h, d]``, one dtype; see ``te.attention.attend_packed``."""
    kind = inside_document(mask_type)
    if kind not in ("causal", "causal_bottom_right", "no_mask"):
        raise ValueError(f"attn_mask_type {mask_type!r} is not available for packed documents")
    # Lengths are passed on the host, where kernels for one sequence at a time read them.
    host = _on_host(documents)
    cu_q, cu_k = host.cu_seqlens_q, host.cu_seqlens_kv
    padded = documents.cu_seqlens_q_padded is not None
    if padded or (numbers(cu_q)[-1], numbers(cu_k)[-1]) != (query.shape[0], key.shape[0]):
        tokens, keys = (at.to(query.device) for at in _real_tokens(host))
        q = query.index_select(0, tokens)
        k, v = (x.index_select(0, keys) for x in (key, value))
    else:
        tokens, q, k, v = None, query, key, value
    out, _ = attention(
        q, k, v,
        layout="TND",
        scale=scale,
        dropout=dropout,
        sink=sink,
        cu_q=cu_q,
        cu_k=cu_k,
        **_position_bias(None, slopes, 0),
        **_packed_mask_options(kind, window),
    )  # fmt: skip
    if tokens is not None:  # scatter back; padding is zero
        out = out.new_zeros(query.shape[0], *out.shape[1:]).index_copy(0, tokens, out)
    return out.flatten(1)


def _position_bias(bias: Tensor | None, slopes: Tensor | None, first: int) -> dict[str, Any]:
    """Arguments for a bias, or for ALiBi slopes with the first query at key ``first``."""
    if slopes is not None:
        return {"pse": slopes, "pse_type": ALIBI, "q_start": first}
    if bias is None:
        return {}
    return {"pse": bias.expand((1,) * (4 - bias.dim()) + bias.shape), "pse_type": BIAS_AFTER_SCALE}


def _mask_options(seen: Visibility) -> dict[str, Any]:
    """The operator's mask arguments."""
    if seen.left < 0 and seen.right < 0:
        return {"mode": MASK_ONLY, "mask": seen.masked}
    if isinstance(seen.offset, Tensor):  # another band for every sequence
        keep = seen.keep
        return {"mode": MASK_ONLY, "mask": None if keep is None else ~keep}
    pre = seen.left - seen.offset if seen.left >= 0 else EVERYTHING
    next_ = seen.right + seen.offset if seen.right >= 0 else EVERYTHING
    return {"mode": UNCUT, "pre": pre, "next": next_, "mask": seen.masked}


def _packed_mask_options(kind: str, window: Window) -> dict[str, Any]:
    """The operator's mask arguments inside documents of any length."""
    seen = visibility(kind, 1, 1, window=window)
    if seen.left < 0 and seen.right < 0:
        return {"mode": MASK_ONLY}
    pre = seen.left if seen.left >= 0 else EVERYTHING
    next_ = seen.right if seen.right >= 0 else EVERYTHING
    return {"mode": UNCUT if kind == "causal" else BAND, "pre": pre, "next": next_}


def _on_host(documents: Documents) -> Documents:
    """Cumulative lengths on the host; copied once per micro-batch, whose layers share them."""
    of_host = {one.name: copied(getattr(documents, one.name)) for one in fields(documents)}
    return replace(documents, **of_host)  # type: ignore[arg-type]


@with_values
def copied(cu_seqlens: Tensor | None) -> Tensor | None:
    """``cu_seqlens [n]`` as int64 on the host, cached while the tensor lives unchanged."""
    if cu_seqlens is None or cu_seqlens.is_inference():
        return cu_seqlens if cu_seqlens is None else cu_seqlens.to("cpu", torch.int64)
    version, copy = _copies.get(cu_seqlens, (None, None))
    if version != cu_seqlens._version:
        copy = cu_seqlens.to("cpu", torch.int64)
        if copy is not cu_seqlens:  # which would keep itself alive
            _copies[cu_seqlens] = (cu_seqlens._version, copy)
    return copy


_copies = WeakTensorKeyDictionary()


@with_values
def _real_tokens(documents: Documents) -> tuple[Tensor, Tensor]:
    """Indices of the queries and keys that are not padding, int64."""
    ranges = documents.ranges()
    queries = [torch.arange(q, q + n) for q, _, n, _ in ranges]
    keys = [torch.arange(k, k + n) for _, k, _, n in ranges]
    return torch.cat(queries), torch.cat(keys)


def attend_by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Visibility,
    *,
    block_size: int,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attend by blocks of ``block_size`` queries where ``seen`` is a causal triangle, else at once.

    Arguments and result ``[b, h, s, d_v]`` are those of :func:`mindspeed.te.attention.attend`.
    """
    if not seen.causal or seen.len_q != seen.len_k:
        return attend_at_once(query, key, value, seen, bias=bias, **options)
    parts = []
    for block in blocks(seen.len_q, block_size):
        last = block.stop
        inside = visibility("causal_bottom_right", last - block.start, last, device=query.device)
        q, k, v = query[:, :, block], key[:, :, :last], value[:, :, :last]
        tile = None if bias is None else tile_of(bias, block, slice(0, last))
        parts.append(attend_at_once(q, k, v, inside, bias=tile, **options))
    return torch.cat(parts, 2)
