"""Keys that a query sees: mask types, sliding windows and padding as one band and one tensor.

``True`` in a *keep* mask means "takes part"; Megatron's masks are the other way round (``True`` is
masked). Positions are aligned at the top left corner for ``causal`` and
``padding_causal`` and at the bottom right one for every other type (a query block at the end of the
keys, as in inference):

    key j is visible to query i  <=>  i + offset - left <= j <= i + offset + right
    offset = 0 (top left) or len_k - len_q (bottom right), left/right = window, -1 = unbounded
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)

Mask = Tensor | tuple[Tensor, Tensor] | None
Window = tuple[int, int] | None


@dataclass(frozen=True)
class Visibility:
    """The mask of a batch as a band; a mask tensor is only built where ``keep`` is read.

    Attributes:
        left: Window to the left, -1 is unbounded.
        right: Window to the right.
        offset: Key at which query 0 stands, or one per sequence, ``[b, 1, 1, 1]``.
        masked: Megatron's mask, which hides more keys (True is masked), broadcastable to
            ``[b, h, len_q, len_k]``.
    """

    len_q: int
    len_k: int
    left: int = -1
    right: int = -1
    offset: int | Tensor = 0
    masked: Tensor | None = None
    device: torch.device | None = None

    @property
    def causal(self) -> bool:
        """A plain triangle, aligned top left."""
        return self.masked is None and (self.left, self.right, self.offset) == (-1, 0, 0)

    @property
    def keep(self) -> Tensor | None:
        """The mask, bool (True takes part), broadcastable to ``[b, h, len_q, len_k]``.

        None where every query sees every key, or ``causal`` says it all.
        """
        given = None if self.masked is None else ~self.masked
        if self.causal or (self.left < 0 and self.right < 0):
            return given
        place = torch.arange(self.len_q, device=self.device)[:, None] + self.offset
        key = torch.arange(self.len_k, device=self.device)[None, :]
        keep = torch.ones((), dtype=torch.bool, device=self.device)
        if self.left >= 0:
            keep = keep & (key >= place - self.left)
        if self.right >= 0:
            keep = keep & (key <= place + self.right)
        return keep if given is None else keep & given


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
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    device: torch.device | None = None,
) -> Visibility:
    """Return the keys that the queries of a batch see.

    Args:
        mask_type: One of :data:`MASK_TYPES`.
        window: ``(left, right)``; -1 is unbounded.
        attention_mask: Megatron's bool mask: ``[b, 1, 1, s]`` for padding (a pair for queries and
            keys in cross attention) or anything that broadcasts to ``[b, h, len_q, len_k]``.
        key_lengths: int ``[b]`` real keys per sequence, instead of a padding mask.
        query_lengths: int ``[b]`` real queries per sequence.
    """
    mask_type = canonical(mask_type)
    left, right = _window(mask_type, window)
    masked = _masked(mask_type, attention_mask, key_lengths, len_k)
    offset: int | Tensor = 0
    if mask_type not in ("causal", "padding_causal"):
        offset = _bottom_right(len_q, len_k, attention_mask, query_lengths, key_lengths)
    return Visibility(len_q, len_k, left, right, offset, masked, device)


def _window(mask_type: str, window: Window) -> tuple[int, int]:
    left, right = (-1, -1) if window is None else window
    if "causal" in mask_type:
        return left, 0
    if (left, right) == (-1, 0):
        return -1, -1
    return left, right


def _masked(
    mask_type: str, attention_mask: Mask, key_lengths: Tensor | None, len_k: int
) -> Tensor | None:
    if mask_type == "arbitrary":
        if attention_mask is None or isinstance(attention_mask, tuple):
            raise ValueError("attn_mask_type 'arbitrary' needs one attention_mask tensor")
        return attention_mask.bool()
    if "padding" not in mask_type:
        return None
    if attention_mask is not None:
        masked = attention_mask[1] if isinstance(attention_mask, tuple) else attention_mask
        return masked.bool()
    if key_lengths is None:
        raise ValueError(
            f"attn_mask_type {mask_type!r} needs an attention_mask or cu_seqlens_q/cu_seqlens_kv"
        )
    steps = torch.arange(len_k, device=key_lengths.device)
    return (steps >= key_lengths[:, None])[:, None, None, :]


def _bottom_right(
    len_q: int,
    len_k: int,
    attention_mask: Mask,
    query_lengths: Tensor | None,
    key_lengths: Tensor | None,
) -> int | Tensor:
    """Return ``len_k - len_q``, per sequence where padding makes it differ."""
    if isinstance(attention_mask, tuple):
        query_lengths, key_lengths = ((~m.bool()).sum(-1).flatten() for m in attention_mask)
    if query_lengths is None or key_lengths is None:
        return len_k - len_q
    return (key_lengths - query_lengths)[:, None, None, None]
