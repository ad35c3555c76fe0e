"""Attention of one region on whatever device: calls of :mod:`mindspeed.ops.attention`.

A region is queries and keys that lie together and a diagonal band, which is what the operator's
sparse mode 4 computes. The backward of a region gets the final output and log-sum-exp of its
queries; partial gradients then just add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mindspeed.attention.mask import INF, Region
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
        draws: The random numbers of each region, drawn in the forward pass.
    """

    scale: float
    slopes: torch.Tensor | None = None
    dropout: float = 0.0
    draws: dict[Region, torch.Tensor] = field(default_factory=dict)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, region: Region, softmax: Softmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in one region.

    Args:
        q: Its queries ``[rows, n, d]``.
        k: Its keys ``[cols, g, d]``.
        v: Its values ``[cols, g, d_v]``.
        region: Positions and band.
        softmax: Scale, bias, dropout.

    Returns:
        Output ``[rows, n, d_v]`` and natural log-sum-exp ``[rows, n]`` (fp32; fp64 for fp64).
    """
    if softmax.dropout:
        softmax.draws[region] = _philox.reserve(q, q.shape[0] * q.shape[1] * k.shape[0])
    out, lse = ATTENTION(*_with_batch(q, k, v), *_options(region, softmax))
    return out[:, 0], lse[0].t()


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    region: Region,
    softmax: Softmax,
) -> tuple[torch.Tensor, ...]:
    """Parts of the gradients of q, k and v; ``out`` and ``lse`` are final."""
    dout, q, k, v, out = _with_batch(dout, q, k, v, out)
    log_sum = lse.t().unsqueeze(0).contiguous()
    grads = ATTENTION_BACKWARD(dout, q, k, v, out, log_sum, *_options(region, softmax), False)
    return tuple(x[:, 0] for x in grads[:3])


def _with_batch(*rows: torch.Tensor) -> list[torch.Tensor]:
    return [x.unsqueeze(1) for x in rows]


def _options(region: Region, softmax: Softmax) -> tuple[object, ...]:
    # The band of mode 4 is counted from the last query and the last key.
    pre = EVERYTHING if region.lo == -INF else (region.k1 - region.q1) - region.lo
    post = EVERYTHING if region.hi == INF else region.hi - (region.k1 - region.q1)
    mode = MASK_ONLY if pre == post == EVERYTHING else BAND
    if (pre, post) == (EVERYTHING, 0):
        mode = CAUSAL
    return Problem(
        pse=softmax.slopes,
        rng=softmax.draws.get(region),
        layout="SBND",
        scale=softmax.scale,
        dropout=softmax.dropout,
        mode=mode,
        pre=pre,
        next=post,
        pse_type=ALIBI,
        q_start=region.q0,
        k_start=region.k0,
    ).options()
