"""Megatron's fused rotary embedding of multi-latent attention consists of CUDA Triton kernels.

The flag is on by default, and elsewhere the first forward pass ends in "'function' object is not
subscriptable". In Megatron's arguments it is switched off where the kernels can't run; the unfused
embedding computes the same, also in inference. A configuration that was made without arguments
keeps the flag, and finds the two functions below in place of the kernels.

They take what the kernels take: ``[s, b, n, d]`` or packed ``[t, n, d]``, ``cos`` and ``sin``
``[max_s, 1, 1, e]``; pairs of neighbours are rotated, and stored apart, first members first.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:mla-rope-fusion"


def corrected_arguments(values: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Megatron's arguments that must change on ``device``: empty, or the flag switched off."""
    wanted = values.get("multi_latent_attention") and values.get("apply_rope_fusion")
    return {"apply_rope_fusion": False} if wanted and device != "cuda" else {}


def rope_for_q(
    t: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qk_head_dim: int,
    emb_dim: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> torch.Tensor:
    """Queries ``[..., qk_head_dim + emb_dim]`` with the last ``emb_dim`` entries rotated."""
    assert not rotary_interleaved
    plain, positional = t.split([qk_head_dim, emb_dim], dim=-1)
    angles = _at_positions(cos, sin, t.shape[0], cu_seqlens_q, cp_rank, cp_size)
    return torch.cat([plain, _rotated(positional, *angles)], dim=-1)


def rope_for_kv(
    kv: torch.Tensor,
    k_pos_emb: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: torch.Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[..., k_dim + emb_dim]`` and values ``[..., v_dim]``.

    All heads share the rotated ``k_pos_emb [s, b, 1, emb_dim]`` or ``[t, 1, emb_dim]``.
    """
    assert not rotary_interleaved
    key, value = kv.split([k_dim, v_dim], dim=-1)
    angles = _at_positions(cos, sin, kv.shape[0], cu_seqlens_kv, cp_rank, cp_size)
    rotated = _rotated(k_pos_emb, *angles).expand(*key.shape[:-1], emb_dim)
    return torch.cat([key, rotated], dim=-1), value.contiguous()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x[..., 0::2], x[..., 1::2]
    (cos_left, cos_right), (sin_left, sin_right) = cos.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    left = first * cos_left - second * sin_left
    return torch.cat([left, second * cos_right + first * sin_right], dim=-1)


def _at_positions(
    cos: torch.Tensor,
    sin: torch.Tensor,
    tokens: int,
    cu_seqlens: torch.Tensor | None,
    cp_rank: int,
    cp_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The angles of this rank's tokens; packed sequences each begin at position 0.

    With context parallelism a rank holds part ``cp_rank`` and, mirrored, part
    ``2 cp_size - 1 - cp_rank`` of each packed sequence.
    """
    if cu_seqlens is None:
        return cos[:tokens], sin[:tokens]
    ends = (cu_seqlens // cp_size).tolist()
    positions = []
    for length in (end - begin for begin, end in itertools.pairwise(ends)):
        half = length // 2 if cp_size > 1 else length
        local = torch.arange(length, device=cos.device)
        mirrored = local - half + (2 * cp_size - 1 - cp_rank) * half
        positions.append(torch.where(local < half, local + cp_rank * half, mirrored))
    index = torch.cat(positions)
    return cos[index].squeeze(1), sin[index].squeeze(1)


_FUSED = "megatron.core.fusions.fused_mla_yarn_rope_apply"
PATCHES = (
    Patch(
        f"{_FUSED}:fused_apply_mla_rope_for_q",
        lambda original: rope_for_q,
        OWNER,
        "rotary embedding of latent queries without Triton",
        kind="replace",
        expects="(t, cos, sin, qk_head_dim, emb_dim, cu_seqlens_q, cp_rank, cp_size, ...)",
    ),
    Patch(
        f"{_FUSED}:fused_apply_mla_rope_for_kv",
        lambda original: rope_for_kv,
        OWNER,
        "rotary embedding of latent keys without Triton",
        kind="replace",
        expects="(kv, k_pos_emb, cos, sin, emb_dim, k_dim, v_dim, cu_seqlens_kv, ...)",
    ),
)
