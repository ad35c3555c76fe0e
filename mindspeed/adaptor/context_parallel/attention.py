"""Ring attention and adaptive context parallelism by the original's functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mindspeed.adaptor.context_parallel.arguments import attend_flat
from mindspeed.attention.strategy import Strategy


def ringattn_context_parallel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    n: int,
    cp_para: Mapping[str, Any],
    softmax_scale: float | None = None,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    packed_seq_params: Any = None,
    shapes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attend over a sequence that ranks share, by a ring. Collective.

    With ``cp_para["causal"]`` a rank has the chunks r and 2 P - 1 - r of 2 P (of every document, if
    packed); without, the r-th part. ``cp_inner_ranks`` are the window of a double ring.

    Args:
        q: ``[s, b, n * d]``, fp32, bf16 or fp16; k and v have its dtype.
        k: ``[s, b, groups * d]``.
        v: ``[s, b, groups * d_v]``.
        n: Query heads.
        cp_para: See :data:`mindspeed.adaptor.context_parallel.arguments.KEYS`.
        softmax_scale: Factor on the scores; default ``1 / sqrt(d)``.
        attn_mask: True is hidden: ``[S, S]``, or this rank's queries as a list of tiles.
        dropout_p: Probability of dropping a probability.
        packed_seq_params: ``cu_seqlens_q`` of documents, with or without a leading 0.
        shapes: Tokens of each rank where they differ (not with ``causal``).

    Returns:
        ``[s, b, n * d_v]`` in the dtype of q.

    Raises:
        ConfigError: A key is unknown, or sizes do not fit.
    """
    window = len(cp_para.get("cp_inner_ranks") or ())
    alone = window <= 1 or window >= cp_para["cp_group"].size()
    return attend_flat(
        q, k, v, n, cp_para, Strategy("ring", ring_window=1 if alone else window),
        softmax_scale=softmax_scale, attn_mask=attn_mask, dropout_p=dropout_p,
        packed_seq_params=packed_seq_params, lengths=shapes,
        zigzag=cp_para.get("causal", True) and shapes is None,
    )  # fmt: skip


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
