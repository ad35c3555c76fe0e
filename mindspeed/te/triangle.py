"""Attention of these modules by blocks that skip the keys behind them.

Same arguments as :func:`mindspeed.te.attention.attend`, in whose place a feature puts this
(:mod:`mindspeed.te.kernels`). See :mod:`mindspeed.attention.triangle`.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.attention.triangle import blocks
from mindspeed.ops._visibility import cut
from mindspeed.te.attention import attend as attend_at_once
from mindspeed.te.masks import Visibility, visibility


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: Visibility,
    *,
    block_size: int,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attend by blocks where ``seen`` is a plain triangle, else at once.

    Args:
        query: ``[b, h, s, d]``.
        key: Keys.
        value: Values.
        seen: Which key each query sees.
        block_size: Queries of a block.
        bias: Added to the scaled scores, broadcastable to ``[b, h, s, s]``.
        options: Further arguments of the formula.
    """
    if not seen.causal or seen.len_q != seen.len_k:
        return attend_at_once(query, key, value, seen, bias=bias, **options)
    parts = []
    for rows in blocks(seen.len_q, block_size):
        last = rows.stop
        inside = visibility("causal_bottom_right", last - rows.start, last, device=query.device)
        q, k, v = query[:, :, rows], key[:, :, :last], value[:, :, :last]
        tile = None if bias is None else cut(bias, rows, slice(0, last))
        parts.append(attend_at_once(q, k, v, inside, bias=tile, **options))
    return torch.cat(parts, 2)
