"""Rotary position embedding on ``sbhd``, ``bshd`` and packed ``thd`` tensors.

``freqs [s, 1, 1, d]`` holds the angle of each channel. Pairs of channels are rotated:

    two halves     (x_i, x_{i+d/2})     default
    interleaved    (x_{2i}, x_{2i+1})

Channels beyond ``d`` pass through. Sine and cosine are applied in fp32; they are computed once for
all layers, queries and keys that share ``freqs``. In a packed batch every document starts at
position 0; with context parallelism over p ranks a document is split into 2p chunks, and rank r
holds chunks r and 2p-1-r.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed.te import kernels


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate ``t``; the result has its shape and dtype.

    Args:
        t: Queries or keys, ``[s, b, h, n]``, ``[b, s, h, n]`` or ``[t, h, n]``.
        freqs: fp32 ``[s2, 1, 1, d]`` angles with ``s2`` at least the sequence length, ``d <= n``.
        tensor_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        start_positions: ``[b]`` position of each sequence's first token.
        interleaved: Pairs are adjacent channels.
        fused: Without effect: there is one implementation.
        cu_seqlens: int ``[documents + 1]``, cumulative lengths over all context-parallel ranks.
    """
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError("tensor_format 'thd' needs cu_seqlens")
        table = _packed_table(freqs, cu_seqlens, t.shape[0], cp_size, cp_rank)
    else:
        table = _table(freqs)
    cos, sin = (_of_tokens(part, t, tensor_format, start_positions) for part in table)
    return kernels.rotate(t, cos, sin, interleaved)


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a joint ``[..., groups, q + k + v]`` projection and rotate queries and keys.

    Returns ``[..., n, d]`` queries, ``[..., groups, d]`` keys and values, in the dtype of ``qkv``.
    """
    head = qkv_split_arg_list[1]
    query, key, value = qkv.split(qkv_split_arg_list, dim=-1)
    query = query.reshape(*query.shape[:2], -1, head)
    q, k = (
        apply_rotary_pos_emb(
            x,
            freqs,
            tensor_format,
            start_positions,
            interleaved,
            True,
            cu_seqlens,
            cp_size,
            cp_rank,
        )
        for x, freqs in ((query, q_freqs), (key, k_freqs))
    )
    return q, k, value.contiguous()


def _of_tokens(table: Tensor, t: Tensor, layout: str, starts: Tensor | None) -> Tensor:
    """Slice ``table [positions, 1, 1, d]`` to a shape that broadcasts to ``t``."""
    if layout == "thd":
        return table.squeeze(1)
    if layout not in ("sbhd", "bshd"):
        raise ValueError(f"tensor_format {layout!r} is not one of sbhd, bshd, thd")
    length = t.shape[0 if layout == "sbhd" else 1]
    if table.shape[0] < length:
        raise ValueError(f"freqs cover {table.shape[0]} positions, the sequence has {length}")
    if starts is not None:
        steps = torch.arange(length, device=table.device)[:, None] + starts[None]
        table = table[steps].flatten(2, 3).squeeze(2).unsqueeze(2)
    else:
        table = table[:length]
    return table if layout == "sbhd" else table.transpose(0, 1)


class _Table(NamedTuple):
    cos: Tensor
    sin: Tensor


class _CachedTable(NamedTuple):
    version: int  # of the tensor that is the key
    table: _Table


class _CachedPackedTable(NamedTuple):
    version: int
    cu_seqlens: weakref.ref[Tensor]
    key: tuple[int, ...]  # version of cu_seqlens, tokens, context-parallel size and rank
    table: _Table


_tables = WeakTensorKeyDictionary()
_packed_tables = WeakTensorKeyDictionary()


def _table(freqs: Tensor) -> _Table:
    """Cosine and sine of ``freqs``, cached while the tensor lives unchanged."""
    if not _is_cacheable(freqs):
        return _Table(freqs.cos(), freqs.sin())
    cached = _tables.get(freqs)
    if cached is None or cached.version != freqs._version:
        cached = _tables[freqs] = _CachedTable(freqs._version, _Table(freqs.cos(), freqs.sin()))
    return cached.table


def _packed_table(
    freqs: Tensor, cu_seqlens: Tensor, tokens: int, cp_size: int, cp_rank: int
) -> _Table:
    """Cosine and sine of each of this rank's tokens, cached for the last ``cu_seqlens``."""

    def gather() -> _Table:
        positions = packed_positions(cu_seqlens, tokens, cp_size, cp_rank)
        cos, sin = _table(freqs)
        return _Table(cos[positions], sin[positions])

    if not (_is_cacheable(freqs) and _is_cacheable(cu_seqlens)):
        return gather()
    key = (cu_seqlens._version, tokens, cp_size, cp_rank)
    cached = _packed_tables.get(freqs)
    current = cached is not None and cached.version == freqs._version
    if not current or cached.cu_seqlens() is not cu_seqlens or cached.key != key:
        cached = _CachedPackedTable(freqs._version, weakref.ref(cu_seqlens), key, gather())
        _packed_tables[freqs] = cached
    return cached.table


def _is_cacheable(x: Tensor) -> bool:
    """Whether ``x`` has a version counter that shows in-place changes."""
    return not (torch.compiler.is_compiling() or x.is_inference() or x.requires_grad)


def packed_positions(cu_seqlens: Tensor, tokens: int, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """Return the position inside its document of each of this rank's tokens, int64 ``[tokens]``.

    Computed on the device of ``cu_seqlens``, without synchronising the host. Tokens after the last
    document are padding and get position 0.

    Args:
        cu_seqlens: int ``[documents + 1]``, cumulative lengths over all context-parallel ranks.
        tokens: Tokens on this rank.
    """
    here = cu_seqlens.long() // cp_size
    token = torch.arange(tokens, device=here.device)
    document = torch.searchsorted(here[1:].contiguous(), token, right=True)
    starts, ends = here[:-1], here[1:]
    last = len(starts) - 1
    if last < 0:
        return torch.zeros_like(token)
    inside = document.clamp(max=last)
    position = token - starts[inside]
    chunk = (ends - starts)[inside] // 2
    second = position >= chunk
    if cp_size > 1:
        skipped = torch.where(second, 2 * cp_size - 2 - cp_rank, cp_rank)
        position = position + skipped * chunk
    return torch.where(document > last, 0, position)
