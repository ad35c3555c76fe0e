"""Adaptive context parallelism by the original's function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mindspeed.adaptor.context_parallel.arguments import attend_flat
from mindspeed.attention.strategy import Strategy


def adaptive_attn_context_parallel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    n: int,
    cp_para: Mapping[str, Any],
    softmax_scale: float | None = None,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Attend under any mask where only keys travel that somebody sees. Collective.

    Rank r has the r-th part of the sequence. ``cp_para["scheduling_info"]`` is not read: who needs
    whose keys follows from the mask.

    Args:
        q: ``[s, b, n * d]``, fp32, bf16 or fp16; k and v have its dtype.
        k: ``[s, b, groups * d]``.
        v: ``[s, b, groups * d_v]``.
        n: Query heads.
        cp_para: See :data:`mindspeed.adaptor.context_parallel.arguments.KEYS`.
        softmax_scale: Factor on the scores; default ``1 / sqrt(d)``.
        attn_mask: True is hidden: ``[S, S]``, or this rank's queries as a list of tiles.
        dropout_p: Probability of dropping a probability.

    Returns:
        ``[s, b, n * d_v]`` in the dtype of q.

    Raises:
        ConfigError: A key is unknown, or a query sees no key.
    """
    return attend_flat(
        q, k, v, n, cp_para, Strategy("adaptive", reshard=False),
        softmax_scale=softmax_scale, attn_mask=attn_mask, dropout_p=dropout_p, zigzag=False,
    )  # fmt: skip
