"""Attention over a :class:`VarlenBatch` on any device: calls of :mod:`mindspeed.ops.attention`.

One sequence is a plain call, several are one varlen call (``TND``). The backward pass gets the
final output and log-sum-exp of the queries, so that the partial gradients of all calls add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mindspeed.attention.mask import INF
from mindspeed.attention.varlen_batches import CAUSAL as CAUSAL_BAND
from mindspeed.attention.varlen_batches import FULL, VarlenBatch
from mindspeed.errors import ConfigError
from mindspeed.ops import philox
from mindspeed.ops.attention import ATTENTION, ATTENTION_BACKWARD
from mindspeed.ops.attention_problem import ALIBI, AttentionProblem
from mindspeed.ops.visibility import BAND, CAUSAL, EVERYTHING, MASK_ONLY


@dataclass(frozen=True)
class SoftmaxOptions:
    """Options of the softmax.

    Attributes:
        scale: Factor on the scores.
        slopes: ALiBi: fp32 ``[n]``, ``-slope * |i - j|`` is added to the scaled scores.
        dropout: Dropout rate of the attention probabilities.
        fused_merge: Merge partial outputs with one fused operator.
        draws: Philox seed and offset of each call, reserved in the forward pass.
    """

    scale: float
    slopes: torch.Tensor | None = None
    dropout: float = 0.0
    fused_merge: bool = False
    draws: dict[VarlenBatch, torch.Tensor] = field(default_factory=dict)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: VarlenBatch, softmax: SoftmaxOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in all sequences of a batch: one operator call.

    Args:
        q: Queries of all sequences, concatenated ``[t_q, n, d]``.
        k: Keys ``[t_k, g, d]``.
        v: Values ``[t_k, g, d_v]``.
        batch: Lengths, positions and band of the sequences.
        softmax: Scale, bias, dropout.

    Returns:
        Output ``[t_q, n, d_v]`` in the dtype of q, and natural log-sum-exp ``[t_q, n]`` (fp32; fp64
        for fp64), -inf where a query sees no key.
    """
    if softmax.dropout:
        softmax.draws[batch] = philox.reserve(q, q.shape[1] * batch.probabilities)
    if len(batch.sequences) > 1:
        out, lse = ATTENTION(q, k, v, *_options(batch, softmax))
        return out, lse
    out, lse = ATTENTION(*_with_batch_dim(q, k, v), *_options(batch, softmax))
    return out[:, 0], lse[0].t()


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    batch: VarlenBatch,
    softmax: SoftmaxOptions,
) -> tuple[torch.Tensor, ...]:
    """Partial gradients of q ``[t_q, n, d]``, k ``[t_k, g, d]`` and v ``[t_k, g, d_v]``.

    Args:
        dout: Gradient of the output ``[t_q, n, d_v]``, dtype of q.
        q: As in :func:`forward`.
        k: As in :func:`forward`.
        v: As in :func:`forward`.
        out: Final output of the queries, over all keys ``[t_q, n, d_v]``.
        lse: Final log-sum-exp ``[t_q, n]``, fp32 (fp64 for fp64 inputs).
        batch: As in :func:`forward`.
        softmax: The object of the forward pass.

    Raises:
        ConfigError: With dropout, the forward pass has not called the operator with this batch.
    """
    if softmax.dropout and batch not in softmax.draws:
        raise ConfigError(
            "dropout: forward and backward pass of the plan batch their work differently"
        )
    if len(batch.sequences) > 1:
        options = _options(batch, softmax)
        return ATTENTION_BACKWARD(dout, q, k, v, out, lse.contiguous(), *options, False)[:3]
    dout, q, k, v, out = _with_batch_dim(dout, q, k, v, out)
    log_sum = lse.t().unsqueeze(0).contiguous()
    grads = ATTENTION_BACKWARD(dout, q, k, v, out, log_sum, *_options(batch, softmax), False)
    return tuple(x[:, 0] for x in grads[:3])


def surrogate_output(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """An output for the backward operator where only ``delta = sum(dout * out)`` is known.

    The gradients depend on the output through this sum alone, so any output with the same sum
    gives the same gradients. This one is parallel to ``dout``, the one of least norm.

    Args:
        dout: Gradient of the output ``[t, n, d_v]``.
        delta: ``[t, n]``, fp32 or wider.

    Returns:
        ``[t, n, d_v]`` in the dtype of dout.
    """
    largest = dout.abs().amax(-1, keepdim=True).to(delta.dtype)
    unit = dout / largest.masked_fill(largest == 0, 1)
    square = unit.square().sum(-1, keepdim=True)
    factor = delta.unsqueeze(-1) / (largest * square).masked_fill(largest == 0, 1)
    return (unit * factor).to(dout.dtype)


def _with_batch_dim(*rows: torch.Tensor) -> list[torch.Tensor]:
    return [x.unsqueeze(1) for x in rows]


def _options(batch: VarlenBatch, softmax: SoftmaxOptions) -> tuple[object, ...]:
    pre, post = (EVERYTHING if reach == INF else reach for reach in batch.band)
    mode = {FULL: MASK_ONLY, CAUSAL_BAND: CAUSAL}.get(batch.band, BAND)
    cu_q, cu_k = batch.cu_seqlens if len(batch.sequences) > 1 else (None, None)
    shift = batch.shift or 0
    return AttentionProblem(
        pse=softmax.slopes,
        rng=softmax.draws.get(batch) if softmax.dropout else None,
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
