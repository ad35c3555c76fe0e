"""Causal attention by blocks of queries that skip later keys.

Same arguments as :func:`mindspeed.te.attention.attend`, which a feature replaces by this
(:mod:`mindspeed.te.kernels`). See :mod:`mindspeed.attention.triangle`.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.attention.triangle import blocks
from mindspeed.ops.visibility import tile_of
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
    """Attend by blocks where ``seen`` is the causal triangle, else at once.

    Args:
        query: ``[b, h, s, d]``.
        key: ``[b, h_kv, s, d]``.
        value: ``[b, h_kv, s, d_v]``.
        seen: Which key each query sees.
        block_size: Queries of a block.
        bias: Added to the scaled scores, broadcastable to ``[b, h, s, s]``.
        options: Other arguments of the formula.

    Returns:
        ``[b, h, s, d_v]`` in the dtype of the inputs.
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
