"""Rotary position embedding on ``sbhd``, ``bshd`` and packed ``thd`` tensors.

``freqs [s, 1, 1, d]`` holds the angle of each channel. Pairs of channels are rotated:

    neighbours in two halves   (x_i, x_{i+d/2})     default
    interleaved                (x_{2i}, x_{2i+1})

Channels beyond ``d`` pass through. Sine and cosine are applied in fp32. In a packed batch every
document starts at position 0; with context parallelism over p ranks a document is cut into 2p
chunks and rank r holds chunks r and 2p-1-r.
"""

from __future__ import annotations

import torch


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate ``t``.

    Args:
        t: Queries or keys.
        freqs: ``[s2, 1, 1, d]`` angles with ``s2`` at least the sequence length.
        tensor_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        start_positions: ``[b]`` position of each sequence's first token.
        interleaved: Pair neighbouring channels.
        fused: Without effect: there is one implementation.
        cu_seqlens: Borders of the documents of a packed batch (over all context-parallel ranks).
        cp_size: Context-parallel size.
        cp_rank: Context-parallel rank.
    """
    angles = _angles(t, freqs, tensor_format, start_positions, cu_seqlens, cp_size, cp_rank)
    return _rotate(t, angles, interleaved)


def apply_fused_qkv_rotary_pos_emb(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a joint ``[..., groups, q + k + v]`` projection and rotate queries and keys."""
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


def _angles(
    t: torch.Tensor,
    freqs: torch.Tensor,
    layout: str,
    starts: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Return the angles in a shape that broadcasts to ``t``."""
    if layout == "thd":
        if cu_seqlens is None:
            raise ValueError("tensor_format 'thd' needs cu_seqlens")
        return freqs[packed_positions(cu_seqlens, t.shape[0], cp_size, cp_rank)].squeeze(1)
    if layout not in ("sbhd", "bshd"):
        raise ValueError(f"tensor_format {layout!r} is not one of sbhd, bshd, thd")
    length = t.shape[0 if layout == "sbhd" else 1]
    if freqs.shape[0] < length:
        raise ValueError(f"freqs cover {freqs.shape[0]} positions, the sequence has {length}")
    if starts is not None:
        steps = torch.arange(length, device=freqs.device)[:, None] + starts[None]
        angles = freqs[steps].flatten(2, 3).squeeze(2).unsqueeze(2)
    else:
        angles = freqs[:length]
    return angles if layout == "sbhd" else angles.transpose(0, 1)


def packed_positions(
    cu_seqlens: torch.Tensor, tokens: int, cp_size: int = 1, cp_rank: int = 0
) -> torch.Tensor:
    """Return the position inside its document of each of this rank's tokens."""
    lengths = cu_seqlens.diff().tolist()
    parts = []
    for length in lengths:
        chunk = length // (2 * cp_size)
        if cp_size == 1:
            parts.append(torch.arange(length))
            continue
        for start in (cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk):
            parts.append(torch.arange(start, start + chunk))
    position = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)
    if len(position) < tokens:
        position = torch.cat([position, position.new_zeros(tokens - len(position))])
    return position[:tokens].to(cu_seqlens.device)


def _rotate(t: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    size = angles.shape[-1]
    turning, passing = t[..., :size], t[..., size:]
    cos, sin = angles.cos(), angles.sin()
    x = turning.to(torch.promote_types(t.dtype, angles.dtype))
    if interleaved:
        other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        other = torch.cat([-second, first], dim=-1)
    out = (x * cos + other * sin).to(t.dtype)
    return torch.cat([out, passing], dim=-1) if passing.shape[-1] else out
