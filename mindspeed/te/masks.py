"""Which key a query may see: from mask types, sliding windows and padding to one boolean mask.

``True`` in a *keep* mask means "takes part"; Megatron's masks are the other way round (``True`` is
masked) and are turned here, once. Positions are aligned at the top left corner for ``causal`` and
``padding_causal`` and at the bottom right one for every other type (a query block at the end of the
keys, as in inference):

    key j is visible to query i  <=>  i + offset - left <= j <= i + offset + right
    offset = 0 (top left) or len_k - len_q (bottom right), left/right = window, -1 = unbounded
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)

Mask = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
Window = tuple[int, int] | None


@dataclass(frozen=True)
class Visibility:
    """A plain causal triangle (``causal``, top left) or an explicit ``keep`` mask, or neither."""

    causal: bool
    keep: torch.Tensor | None


def canonical(mask_type: str) -> str:
    """Return the mask type in its usual spelling (``causal,padding`` is ``padding_causal``)."""
    name = mask_type.replace(",", "_").replace("causal_padding", "padding_causal")
    if name not in MASK_TYPES:
        raise ValueError(f"attn_mask_type {mask_type!r} is not one of {', '.join(MASK_TYPES)}")
    return name


def visibility(
    mask_type: str,
    len_q: int,
    len_k: int,
    *,
    window: Window = None,
    attention_mask: Mask = None,
    key_lengths: torch.Tensor | None = None,
    query_lengths: torch.Tensor | None = None,
    device: torch.device | None = None,
) -> Visibility:
    """Say what the queries of a batch may see.

    Args:
        mask_type: One of :data:`MASK_TYPES`.
        len_q: Number of queries.
        len_k: Number of keys.
        window: ``(left, right)``; -1 is unbounded.
        attention_mask: Megatron's mask: ``[b, 1, 1, s]`` for padding (a pair for queries and keys
            in cross attention) or anything that broadcasts to ``[b, h, len_q, len_k]``.
        key_lengths: ``[b]`` real keys per sequence, instead of a padding mask.
        query_lengths: ``[b]`` real queries per sequence.
        device: Where to build the mask.
    """
    mask_type = canonical(mask_type)
    left, right = _window(mask_type, window)
    padding = _padding(mask_type, attention_mask, key_lengths, len_k)
    bottom_right = mask_type not in ("causal", "padding_causal")
    if padding is None and left < 0 and right == 0 and (not bottom_right or len_q == len_k):
        return Visibility(causal=True, keep=None)
    if left < 0 and right < 0:
        return Visibility(causal=False, keep=padding)
    offset: int | torch.Tensor = 0
    if bottom_right:
        offset = _bottom_right(len_q, len_k, attention_mask, query_lengths, key_lengths)
    band = _band(len_q, len_k, left, right, offset, device)
    return Visibility(causal=False, keep=band if padding is None else band & padding)


def _window(mask_type: str, window: Window) -> tuple[int, int]:
    left, right = (-1, -1) if window is None else window
    if "causal" in mask_type:
        return left, 0
    if (left, right) == (-1, 0):
        return -1, -1
    return left, right


def _padding(
    mask_type: str, attention_mask: Mask, key_lengths: torch.Tensor | None, len_k: int
) -> torch.Tensor | None:
    if mask_type == "arbitrary":
        if attention_mask is None or isinstance(attention_mask, tuple):
            raise ValueError("attn_mask_type 'arbitrary' needs one attention_mask tensor")
        return ~attention_mask.bool()
    if "padding" not in mask_type:
        return None
    if attention_mask is not None:
        masked = attention_mask[1] if isinstance(attention_mask, tuple) else attention_mask
        return ~masked.bool()
    if key_lengths is None:
        raise ValueError(
            f"attn_mask_type {mask_type!r} needs an attention_mask or cu_seqlens_q/cu_seqlens_kv"
        )
    steps = torch.arange(len_k, device=key_lengths.device)
    return (steps < key_lengths[:, None])[:, None, None, :]


def _bottom_right(
    len_q: int,
    len_k: int,
    attention_mask: Mask,
    query_lengths: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
) -> int | torch.Tensor:
    """Return ``len_k - len_q``, per sequence where padding makes it differ."""
    if isinstance(attention_mask, tuple):
        query_lengths, key_lengths = ((~m.bool()).sum(-1).flatten() for m in attention_mask)
    if query_lengths is None or key_lengths is None:
        return len_k - len_q
    return (key_lengths - query_lengths)[:, None, None, None]


def _band(
    len_q: int,
    len_k: int,
    left: int,
    right: int,
    offset: int | torch.Tensor,
    device: torch.device | None,
) -> torch.Tensor:
    place = torch.arange(len_q, device=device)[:, None] + offset
    key = torch.arange(len_k, device=device)[None, :]
    keep = torch.ones((), dtype=torch.bool, device=device)
    if left >= 0:
        keep = keep & (key >= place - left)
    if right >= 0:
        keep = keep & (key <= place + right)
    return keep
