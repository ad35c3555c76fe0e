"""Attention of a pack of pieces on whatever device: calls of :mod:`mindspeed.ops.attention`.

One piece is a call of its own, several are one call with packed sequences. The backward of a pack
gets the final output and log-sum-exp of its queries; partial gradients then just add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mindspeed.attention.calls import CAUSAL as CAUSAL_BAND
from mindspeed.attention.calls import WHOLE, Pack
from mindspeed.attention.mask import INF
from mindspeed.errors import ConfigError
from mindspeed.ops import _philox
from mindspeed.ops._attention_problem import ALIBI, Problem
from mindspeed.ops._visibility import BAND, CAUSAL, EVERYTHING, MASK_ONLY
from mindspeed.ops.attention import ATTENTION, ATTENTION_BACKWARD


@dataclass(frozen=True)
class Softmax:
    """What happens between scores and probabilities.

    Attributes:
        scale: Factor on the scores.
        slopes: ALiBi: fp32 ``[n]``, ``-slope * |i - j|`` is added to the scaled scores.
        dropout: Probability of dropping a probability.
        fused_merge: Partial outputs are merged by one operator.
        draws: The random numbers of each call, drawn in the forward pass.
    """

    scale: float
    slopes: torch.Tensor | None = None
    dropout: float = 0.0
    fused_merge: bool = False
    draws: dict[Pack, torch.Tensor] = field(default_factory=dict)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pack: Pack, softmax: Softmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in all pieces of a pack: one operator call.

    Args:
        q: Their queries one behind the other ``[rows, n, d]``.
        k: Their keys ``[cols, g, d]``.
        v: Their values ``[cols, g, d_v]``.
        pack: Lengths, positions and band.
        softmax: Scale, bias, dropout.

    Returns:
        Output ``[rows, n, d_v]`` and natural log-sum-exp ``[rows, n]`` (fp32; fp64 for fp64), -inf
        where a query sees nothing.
    """
    if softmax.dropout:
        softmax.draws[pack] = _philox.reserve(q, q.shape[1] * pack.probabilities)
    if len(pack.pieces) > 1:
        out, lse = ATTENTION(q, k, v, *_options(pack, softmax))
        return out, lse
    out, lse = ATTENTION(*_with_batch(q, k, v), *_options(pack, softmax))
    return out[:, 0], lse[0].t()


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    pack: Pack,
    softmax: Softmax,
) -> tuple[torch.Tensor, ...]:
    """Parts of the gradients of q, k and v; ``out`` and ``lse`` are final."""
    if softmax.dropout and pack not in softmax.draws:
        raise ConfigError("dropout: the backward pass of the plan packs its work in another way")
    if len(pack.pieces) > 1:
        options = _options(pack, softmax)
        return ATTENTION_BACKWARD(dout, q, k, v, out, lse.contiguous(), *options, False)[:3]
    dout, q, k, v, out = _with_batch(dout, q, k, v, out)
    log_sum = lse.t().unsqueeze(0).contiguous()
    grads = ATTENTION_BACKWARD(dout, q, k, v, out, log_sum, *_options(pack, softmax), False)
    return tuple(x[:, 0] for x in grads[:3])


def stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """An output for the backward pass where only ``delta = sum(dout * out)`` is known.

    Gradients need the output for this sum alone, so any with the same sum does: the shortest one.

    Args:
        dout: Gradient of the output ``[t, n, d_v]``.
        delta: ``[t, n]``, fp32 or wider.
    """
    largest = dout.abs().amax(-1, keepdim=True).to(delta.dtype)
    unit = dout / largest.masked_fill(largest == 0, 1)
    square = unit.square().sum(-1, keepdim=True)
    factor = delta.unsqueeze(-1) / (largest * square).masked_fill(largest == 0, 1)
    return (unit * factor).to(dout.dtype)


def _with_batch(*rows: torch.Tensor) -> list[torch.Tensor]:
    return [x.unsqueeze(1) for x in rows]


def _options(pack: Pack, softmax: Softmax) -> tuple[object, ...]:
    pre, post = (EVERYTHING if reach == INF else reach for reach in pack.band)
    mode = {WHOLE: MASK_ONLY, CAUSAL_BAND: CAUSAL}.get(pack.band, BAND)
    cu_q, cu_k = pack.cu_seqlens if len(pack.pieces) > 1 else (None, None)
    shift = pack.shift or 0
    return Problem(
        pse=softmax.slopes,
        rng=softmax.draws.get(pack) if softmax.dropout else None,
        cu_q=cu_q,
        cu_k=cu_k,
        layout="SBND" if cu_q is None else "TND",
        scale=softmax.scale,
        dropout=softmax.dropout,
        mode=mode,
        pre=pre,
        next=post,
        pse_type=ALIBI,
        q_start=max(shift, 0),
        k_start=max(-shift, 0),
    ).options()
